# One image for the server and the clients: docs/containers.md says how to build, check and run it.
# Both stages stand on the same base, so that the interpreter of the virtual environment is there.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# `grpc` suffices to sum vectors; `grpc,torch` trains, too.
ARG EXTRAS=grpc,torch
# Another index for pip, such as PyTorch's own of builds without CUDA, which are gigabytes smaller.
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /src
COPY . .
# The variables carry the constraints into the isolated build environment, which -c does not reach.
# Headers and tests of torch are of no use without a compiler. The last line fails if the kernels
# were not compiled: an image without them would be slow, silently.
RUN python3 -m venv /opt/lightsecagg \
    && PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
       /opt/lightsecagg/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && /opt/lightsecagg/bin/pip uninstall -y pip \
    && rm -rf /opt/lightsecagg/lib/python3*/site-packages/torch/include \
              /opt/lightsecagg/lib/python3*/site-packages/torch/test \
    && LIGHTSECAGG_KERNELS=native /opt/lightsecagg/bin/lightsecagg --version

FROM ${BASE}
RUN useradd --uid 1000 --user-group --home-dir /party --no-create-home --shell /usr/sbin/nologin party \
    && install -d -o party -g party -m 0700 /party
COPY --from=build /opt/lightsecagg /opt/lightsecagg
# Nothing but the party's own folder is ever written, so the file system can be read-only.
ENV PATH=/opt/lightsecagg/bin:$PATH \
    LIGHTSECAGG_KERNELS=native \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# The party's folder (configuration, certificate, keys, state or ledger) is mounted here.
WORKDIR /party
USER 1000:1000
ENTRYPOINT ["lightsecagg"]
