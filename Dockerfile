# An image of lm_trainer. For a CPU:   docker build -t lmt .
# For NVIDIA GPUs (CUDA 12, or 13):    docker build -t lmt --build-arg EXTRAS=gpu .      (EXTRAS=gpu13)
# A run, with its outcome here:        docker run --rm -v "$PWD:/runs" lmt train gpt2_nano
#                                      docker run --rm --gpus all -v "$PWD:/runs" lmt train my.yaml
# CUDA comes in the wheels of JAX, so that the image needs no other base for GPUs: the driver of the host is enough.
#
# The base is fixed by its digest. For a newer one:  docker buildx imagetools inspect python:3.12-slim-bookworm
ARG BASE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579
FROM ${BASE} AS build

WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md constraints.txt ./
COPY lm_trainer lm_trainer
COPY cli cli
COPY configs configs
ARG EXTRAS=
RUN python -m venv /app \
    && /app/bin/pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"

FROM ${BASE}

COPY --from=build /app /app
ENV PATH=/app/bin:$PATH
# Not root: what a run writes into /runs belongs to this user.
RUN useradd --create-home --uid 1000 lmt && mkdir /runs && chown lmt /runs
USER 1000
WORKDIR /runs
ENTRYPOINT ["lmt"]
CMD ["--help"]
