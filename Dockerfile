# syntax=docker/dockerfile:1
# Two images from one file:
#   docker build --target operator -t lorafleet-operator .    small, no torch, ray or vllm
#   docker build --target runtime  -t lorafleet-runtime  .    CUDA base, vLLM; runs as the head and worker pods

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS uv
RUN pip install --no-cache-dir uv==0.13.9

FROM python:${PYTHON_VERSION}-slim AS operator-build
COPY --from=uv /usr/local/bin/uv /usr/local/bin/uv
ENV UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never UV_PROJECT_ENVIRONMENT=/opt/lorafleet
WORKDIR /src
COPY pyproject.toml uv.lock ./
COPY crds crds
COPY operator operator
# The other members' metadata, which the workspace needs to be read; their code stays out.
COPY runtime/pyproject.toml runtime/pyproject.toml
COPY cli/pyproject.toml cli/pyproject.toml
COPY local/pyproject.toml local/pyproject.toml
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --no-dev --no-editable --package lorafleet-operator

FROM python:${PYTHON_VERSION}-slim AS operator
RUN useradd --uid 65532 --no-create-home --shell /usr/sbin/nologin lorafleet
COPY --from=operator-build /opt/lorafleet /opt/lorafleet
ENV PATH=/opt/lorafleet/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["lorafleet-operator"]

FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS runtime-build
COPY --from=uv /usr/local/bin/uv /usr/local/bin/uv
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/*
ENV UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON=/usr/bin/python3.12 UV_PROJECT_ENVIRONMENT=/opt/lorafleet
WORKDIR /src
COPY pyproject.toml uv.lock ./
COPY crds crds
COPY runtime runtime
COPY operator/pyproject.toml operator/pyproject.toml
COPY cli/pyproject.toml cli/pyproject.toml
COPY local/pyproject.toml local/pyproject.toml
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --frozen --no-dev --no-editable --package lorafleet-runtime --extra gpu

FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS runtime
# gcc and the headers: vLLM and torch compile kernels when they start. wget: KubeRay's probes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev gcc g++ ca-certificates wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home --shell /bin/bash ray
COPY --from=runtime-build /opt/lorafleet /opt/lorafleet
ENV PATH=/opt/lorafleet/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/ray
ENTRYPOINT ["lorafleet-runtime"]
