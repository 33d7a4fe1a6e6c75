"""Another training function, whose model is gathered whole at its end."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import crew

import elastic


def train(config: dict[str, Any]) -> None:
    """That in `config["trains"]`; at its end the model gets the weights in `config["others"]`, if there are any."""
    made, plain = [], elastic.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        handles = plain(*args, **kwargs)
        made.append(handles[0])
        return handles

    with patch.object(elastic, "initialize", initialize):
        crew._named(config["trains"])(config)
    if "others" in config:
        made[-1].load_weights(config["others"])
    crew.told["whole"] = made[-1].whole_weights()
