# A server in a container; README.md, "In a container", has the commands. Built for CPUs, or with
# --build-arg TORCH=cuda for NVIDIA GPUs. No model is inside: models come into the volume /cache.
ARG PYTHON=3.12
ARG TORCH=cpu
# ray: for replicas on Kubernetes (docs/scale.md).
ARG EXTRAS=server
# What the tests pass with.
ARG TORCH_VERSION=2.13.0

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /build
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
# `surefoot --version` tells it.
ARG COMMIT
RUN SUREFOOT_COMMIT=${COMMIT} pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS base
# The CPU kernels are compiled on the first start, for the CPU that is there, and so are Triton's.
# KubeRay asks for a pod's health with wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/*
COPY constraints-cpu.txt /constraints.txt

FROM base AS torch-cpu
ARG TORCH_VERSION
RUN pip install --no-cache-dir --constraint /constraints.txt "torch==${TORCH_VERSION}" \
    --index-url https://download.pytorch.org/whl/cpu

FROM base AS torch-cuda
ARG TORCH_VERSION
RUN pip install --no-cache-dir --constraint /constraints.txt "torch==${TORCH_VERSION}"

# hadolint ignore=DL3006
FROM torch-${TORCH}
ARG EXTRAS
COPY --from=wheel /wheels /wheels
RUN set -- /wheels/*.whl \
    && pip install --no-cache-dir --constraint /constraints.txt "$1[${EXTRAS}]" \
    && useradd --uid 10001 --home-dir /cache --create-home surefoot
USER 10001
WORKDIR /cache
ENV SUREFOOT_CACHE=/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /cache
EXPOSE 8000
# The first start fetches the model and compiles kernels.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["surefoot"]
CMD ["serve", "--host", "0.0.0.0"]
