# Three images. None was built by the authors, who have no container runtime.
#   docker build --target serve -t ddp-vllm:0.3.0 .     vLLM's own image and the plugin: a server
#   docker build --target prune -t ddp-vllm:prune .     with everything: prune, eval, bench
#   docker build --target cpu -t ddp-vllm:cpu .         no GPU: the demo and the tests
# Prune, with the models of the host:
#   docker run --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface -v "$PWD:/data" -w /data ddp-vllm:prune \
#       prune MODEL --speedup 1.25 --data chats.jsonl -o ./pruned
# Serve: docs/production.md

FROM vllm/vllm-openai:v0.32.0 AS serve
COPY . /opt/ddp-vllm
RUN pip install --no-cache-dir --no-deps /opt/ddp-vllm

FROM vllm/vllm-openai:v0.32.0 AS prune
COPY . /opt/ddp-vllm
RUN pip install --no-cache-dir "/opt/ddp-vllm[prune,eval]"
ENTRYPOINT ["ddp-vllm"]

FROM python:3.11-bookworm AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
COPY . /opt/ddp-vllm
WORKDIR /opt/ddp-vllm
RUN make install
ENV PATH=/opt/ddp-vllm/.venv/bin:$PATH
ENTRYPOINT ["ddp-vllm"]
