# slime in a container, built from the package index; no image with engines in it is needed.
#
#   docker build -t slime .                       on a CPU
#   docker build -t slime --target gpu .          with NVIDIA GPUs; CUDA comes with the wheels
#   docker run --rm -it --shm-size=2g slime slime recipe demo
#
# BASE: an image with apt and Python 3.11 or 3.12. TORCH_INDEX: a package index with CPU builds of torch; leave it empty
# if the default index serves them.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS system
# Triton and torch compile at run time. The libraries are for prefill and decode engines on a CPU, and wget is for
# KubeRay's health checks.
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    ca-certificates g++ python3 python3-dev python3-venv libcurl4 libibverbs1 libnuma1 wget \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/slime
ENV PATH=/opt/slime/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TMPDIR=/tmp
WORKDIR /workspace
CMD ["slime", "doctor"]

# A wheel of this checkout, built out of its source distribution.
FROM system AS wheel
COPY . /source
RUN pip install build && python -m build --outdir /dist /source

FROM system AS gpu
COPY --from=wheel /dist/*.whl /dist/
RUN pip install "$(echo /dist/*.whl)[gpu]"

FROM system AS cpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY requirements /requirements
COPY --from=wheel /dist/*.whl /dist/
RUN pip install --constraint /requirements/constraints.txt "$(echo /dist/*.whl)[cpu]" "$TORCH" \
 && pip install --no-deps --requirement /requirements/cpu-engines-no-deps.txt
