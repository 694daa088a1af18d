# One image for the server and the clients. Untested: see docs/federation.md.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt '.[all]' && rm -rf /src

# A party's folder (configuration, certificate, keys; the server's state too) is mounted here.
RUN useradd --create-home --uid 1000 party
USER party
WORKDIR /party

ENTRYPOINT ["lightsecagg"]
