"""Text for calibration: files of several formats and a built-in corpus, as token sequences of one length."""

import hashlib
import json
import random
import re
import string
import sysconfig
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_oscar.errors import ConfigError

Split = Literal["calibration", "held_out"]
HELD_OUT_SHARE = 0.35  # of the built-in corpus
CANDIDATES = 8  # sequences are drawn from the first CANDIDATES times as many: a huge file need not be read to its end
_DATASET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PASSAGE = 64  # tokens of a passage that returns
_PIECE = 1 << 20  # characters of a plain text file tokenised at once


@dataclass(frozen=True)
class Corpus:
    """Documents to take sequences from.

    Attributes:
        name: for the record in the sidecar
        documents: read once
        separate: documents are unrelated: an end-of-text token goes between them
        shuffle: draw sequences by seed; False: take the first ones
    """

    name: str
    documents: Iterable[str]
    separate: bool
    shuffle: bool


@dataclass(frozen=True)
class Sequences:
    """What calibration runs over.

    Attributes:
        ids: int64 (sequences, length)
        name: of the corpus
        digest: SHA-256 of ids, hexadecimal
    """

    ids: torch.Tensor
    name: str
    digest: str

    @classmethod
    def of(cls, ids: torch.Tensor, name: str) -> "Sequences":
        """Token ids with their digest."""
        return cls(ids, name, hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest())


def open_corpus(path: str | None, tokenizer: Any) -> Corpus:
    """A corpus by its file name; None: the built-in one.

    .jsonl and .parquet hold rows with "text" or with "messages" (for the tokenizer's chat template), and so does a
    dataset of the Hugging Face hub (OWNER/NAME, its train split); every other file is plain UTF-8 text.

    Raises:
        ConfigError: no such file, or one that cannot be read this way.
    """
    if path is None:
        return Corpus("built-in", _builtin_pieces("calibration"), separate=False, shuffle=False)
    file = Path(path)
    if not file.exists() and _DATASET.fullmatch(path):
        return Corpus(path, (_row_text(row, path, tokenizer) for row in _hub_rows(path)), True, True)
    if not file.is_file():
        raise ConfigError(f"--data {path}: no such file")
    if file.suffix in (".jsonl", ".ndjson"):
        return Corpus(file.name, (_row_text(row, path, tokenizer) for row in _json_rows(file)), True, True)
    if file.suffix == ".parquet":
        return Corpus(file.name, (_row_text(row, path, tokenizer) for row in _parquet_rows(file)), True, True)
    return Corpus(file.name, _text_pieces(file), separate=False, shuffle=True)


def _text_pieces(file: Path) -> Iterator[str]:
    """A text file in pieces that end at line ends."""
    try:
        with file.open(encoding="utf-8") as lines:
            while piece := lines.read(_PIECE):
                yield piece + lines.readline()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--data {file}: not UTF-8 text ({error}); use text, .jsonl or .parquet") from error


def _json_rows(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:  # also numbers of too many digits
                    raise ConfigError(f"--data {file}, line {number}: not JSON that can be read ({error})") from error


def _parquet_rows(file: Path) -> Iterator[Any]:
    try:
        from pyarrow.parquet import ParquetFile  # an optional dependency
    except ImportError as error:
        raise ConfigError(f"--data {file}: Parquet needs pyarrow (pip install pyarrow), or use .jsonl") from error
    try:
        opened = ParquetFile(file)
        columns = [name for name in ("text", "messages") if name in opened.schema_arrow.names]
        for batch in opened.iter_batches(batch_size=256, columns=columns):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data {file}: not a whole Parquet file ({error!s:.200})") from error


def _hub_rows(name: str) -> Iterator[Any]:
    try:
        from datasets import load_dataset  # an optional dependency
    except ImportError as error:
        raise ConfigError(f"--data {name}: no such file; a dataset needs `datasets` (pip install datasets)") from error
    try:
        yield from load_dataset(name, split="train", streaming=True)
    except (OSError, ValueError) as error:  # offline, or no such dataset
        raise ConfigError(f"--data {name}: no such file, and no dataset that can be read ({error})") from error


def _row_text(row: Any, path: str, tokenizer: Any) -> str:
    messages = row.get("messages") if isinstance(row, dict) else None
    if messages:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f'--data {path} holds chats, but the tokenizer has no chat template; use rows with "text"'
            )
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'--data {path}: a row has neither "text" nor "messages"')
    return text


def sequences(corpus: Corpus, tokenizer: Any, count: int, length: int, seed: int) -> Sequences:
    """Pack documents into sequences of `length` tokens and draw up to `count` of them.

    Each starts with what the tokenizer starts a text with (a BOS token, or nothing).

    Raises:
        ConfigError: the text does not fill one sequence.
    """
    end = tokenizer.eos_token_id if corpus.separate else None
    start = _start(tokenizer)
    body = length - len(start)
    wanted = count * body * (CANDIDATES if corpus.shuffle else 1)
    tokens: list[int] = []
    for text in corpus.documents:
        tokens += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if end is not None:
            tokens.append(end)
        if len(tokens) >= wanted:
            break
    available = min(len(tokens), wanted) // body
    if not available:
        raise ConfigError(
            f"{corpus.name} has {len(tokens)} tokens, one sequence takes {length}; use more text or a smaller --length"
        )
    ids = torch.tensor(tokens[: available * body], dtype=torch.int64).view(available, body)
    if corpus.shuffle:
        ids = ids[torch.randperm(available, generator=torch.Generator().manual_seed(seed))]
    ids = ids[:count]
    return Sequences.of(torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(ids), -1), ids], 1), corpus.name)


def with_returns(data: Sequences, tokenizer: Any) -> Sequences:
    """The second half of every other sequence says again what the first half says: passages of PASSAGE tokens, in
    another order. A quarter of them are numbers, UUIDs and names that mean nothing.

    What finds a passage far behind the window has little to do in plain text of these lengths: keys calibrated on it
    keep what the average query looks at, and lose some of what a match is found by. docs/quality.md has what it gives.

    Raises:
        ConfigError: nothing would return.
    """
    first = len(_start(tokenizer))  # a second BOS token would be an outlier
    half = (data.ids.shape[1] - first) // 2 // (4 * PASSAGE) * 4 * PASSAGE
    if len(data.ids) < 2 or not half:
        raise ConfigError(f"--returns takes at least --sequences 2 and --length {first + 8 * PASSAGE}")
    ids = data.ids.clone()
    for number, row in enumerate(ids[1::2, first:]):
        draw = random.Random(number)
        strings = tokenizer("\n".join(_string(draw) for _ in range(half // 4)), add_special_tokens=False).input_ids
        row[half - half // 4 : half] = torch.tensor(strings[: half // 4])
        passages = row[:half].view(-1, PASSAGE)
        row[half : 2 * half] = passages[draw.sample(range(len(passages)), len(passages))].flatten()
    return Sequences.of(ids, f"{data.name}, every other sequence with returns")


def _start(tokenizer: Any) -> list[int]:
    """What the tokenizer starts a text with: a BOS token, or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []


def _string(draw: random.Random) -> str:
    """What has to be remembered letter by letter."""
    kind = draw.randrange(3)
    if kind == 0:
        return str(uuid.UUID(int=draw.getrandbits(128)))
    if kind == 1:
        return "".join(draw.choices(string.digits, k=draw.randint(5, 12)))
    return "".join(draw.choices(string.ascii_letters + "_", k=draw.randint(6, 14)))


def builtin_text(split: Split, kind: Literal["prose", "code"] = "prose") -> str:
    """Text that every Python installation has: its language reference (English prose) or its library's sources.

    The two splits share no topic, no module and no paragraph (the reference repeats sections under several topics).
    """
    return "\n\n".join(_split(_prose() if kind == "prose" else _code())[split])


def _builtin_pieces(split: Split) -> Iterator[str]:
    """Prose first; the code behind it is read only where more is asked for."""
    yield builtin_text(split, "prose")
    yield "\n\n"
    yield from _split(_code())[split]


def _prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _code() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8")


def _split(documents: Iterable[str]) -> dict[Split, list[str]]:
    """Whole documents to the two splits, each paragraph only where it is seen first."""
    seen: set[str] = set()
    parts: dict[Split, list[str]] = {"calibration": [], "held_out": []}
    sizes = {"calibration": 0, "held_out": 0}
    for document in documents:
        fresh = []
        for paragraph in re.split(r"\n\s*\n", document):
            key = " ".join(paragraph.split()).lower()
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph)
        behind = sizes["held_out"] < HELD_OUT_SHARE * (sizes["held_out"] + sizes["calibration"])
        split: Split = "held_out" if behind else "calibration"
        parts[split].append("\n\n".join(fresh))
        sizes[split] += len(parts[split][-1])
    return parts
