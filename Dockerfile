# An image with this package, to train in; docs/clusters.md says how it is started.
#   docker build -t torchtitan-toml .                                   for CPUs
#   docker build -t torchtitan-toml --build-arg TORCH=cu130 .           for NVIDIA GPUs, driver 580 or newer
#   docker build -t torchtitan-toml --build-arg OFFLINE=1 --network none .   from the folder wheels/ alone
# Needs BuildKit (docker 23 or newer), podman or buildah. The offline image was built by buildah 1.28 and trained as its
# user; the other two indices could not be reached where this was written.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
ARG OFFLINE=
WORKDIR /source
COPY . .
RUN pip wheel --no-deps -w /wheel ${OFFLINE:+--no-index --find-links wheels} .

FROM python:${PYTHON}-slim
# torch's build: cpu, cu126, cu130, ...; the index has those of the pinned version
ARG TORCH=cpu
ARG OFFLINE=
# extras of pyproject.toml with their brackets, such as [data,wandb]
ARG EXTRAS=
# torch.compile and triton need one; "" leaves it out, and everything runs without compiling
ARG COMPILER=g++
RUN if [ -n "$COMPILER" ] && [ -z "$OFFLINE" ]; then apt-get update && \
    apt-get install -y --no-install-recommends "$COMPILER" && rm -rf /var/lib/apt/lists/*; fi
RUN --mount=type=bind,target=/source --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    if [ -n "$OFFLINE" ]; then from="--no-index --find-links /source/wheels"; \
    else from="--extra-index-url https://download.pytorch.org/whl/$TORCH"; fi && \
    pip install --no-cache-dir --no-compile -c /source/constraints.txt $from "$(echo /wheel/*.whl)$EXTRAS"
RUN useradd --uid 1000 --create-home titan && mkdir /work && chown titan /work
USER titan
WORKDIR /work
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["torchtitan"]
CMD ["--help"]
