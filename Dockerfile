# vLLM's own image with this plugin: docs/docker.md
#
#   docker build --tag vllm-oscar .
#   docker run --gpus all --ipc host -p 8000:8000 -v ~/.cache:/root/.cache vllm-oscar MODEL
ARG VLLM_VERSION=v0.33.0
FROM vllm/vllm-openai:${VLLM_VERSION}

COPY pyproject.toml README.md LICENSE /opt/vllm-oscar/
COPY vllm_oscar /opt/vllm-oscar/vllm_oscar
COPY calibrate /opt/vllm-oscar/calibrate
# torch and all that vLLM brings are there and stay as they are
RUN uv pip install --system --no-cache '/opt/vllm-oscar[calibrate]'

ENTRYPOINT ["oscar", "serve"]
