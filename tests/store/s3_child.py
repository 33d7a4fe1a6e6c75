"""A process of its own that serves S3 on a free port: prints the port, ends when its stdin does.

`python s3_child.py [ADDRESS]`: of the loopback interface, unless another address is given.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _Handler(WSGIRequestHandler):
    # Clients keep connections open, as they do with the real service.
    protocol_version = "HTTP/1.1"


def main() -> None:
    # A line for each request would fill the pipe that nobody reads.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    server = make_server(address, 0, application, threaded=True, request_handler=_Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
