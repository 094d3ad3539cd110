# Two images; neither was built by the authors, who have no container runtime.
#   docker build --target gpu -t ddp-vllm .          CUDA, from vLLM's own image
#   docker build --target cpu -t ddp-vllm:cpu .      no GPU: the demo and the tests
# Run, with the models of the host:
#   docker run --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface -v "$PWD:/data" -w /data ddp-vllm \
#       prune MODEL --speedup 1.25 --data chats.jsonl -o ./pruned

FROM vllm/vllm-openai:v0.32.0 AS gpu
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
