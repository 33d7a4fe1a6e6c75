# What every pod of a run is made of: Ray, DeepSpeed, this package and your code, run by user 1000.
#
#   docker build -t team/ray-elastic:0.1.0 .                                                     the CPU, and examples/
#   docker build -t team/gpt:1 --build-arg BASE_IMAGE=nvidia/cuda:12.8.1-devel-ubuntu22.04 \
#                --build-arg APP=my_job --build-arg PIP_ARGS="--index-url URL" .                   CUDA, and your code
#
# BASE_IMAGE  Debian or Ubuntu with Python 3.10 to 3.12, or without any: it is installed then. For CUDA one with the
#             compiler ("devel"), since DeepSpeed compiles its operators at first use.
# PIP_ARGS    where torch comes from. On Linux the usual one is the CUDA build, which is large and does no harm on a CPU.
# APP         the folder with the job file and the code that it names. It becomes /app.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# bash, sleep and wget are KubeRay's: it starts Ray by the first, and asks by the last whether a pod is well.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash ca-certificates coreutils g++ wget \
    && (command -v python3 || apt-get install --yes --no-install-recommends python3 python3-dev python3-venv) \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0

ARG PIP_ARGS=""
WORKDIR /src
# Torch first and by itself: the newest would bring other CUDA libraries than this release of DeepSpeed is tested with.
RUN pip install --no-cache-dir ${PIP_ARGS} "torch>=2.13,<2.14"
COPY pyproject.toml README.md LICENSE ./
COPY elastic elastic
COPY jobs jobs
COPY cluster cluster
RUN pip install --no-cache-dir ${PIP_ARGS} ".[s3]"

# Pods run as this user whatever the image says, and Pod Security `restricted` takes no other than a number.
RUN useradd --uid 1000 --create-home --shell /bin/bash ray
ARG APP=examples
COPY --chown=1000:1000 ${APP} /app
WORKDIR /app
USER 1000
