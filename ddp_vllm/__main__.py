"""`python -m ddp_vllm` is `ddp-vllm`."""

from ddp_vllm.cli import main

main(prog_name="ddp-vllm")
