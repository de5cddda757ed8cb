"""Train the demo model: a small Llama, from scratch, on the text of the running CPython's own standard library.

    python examples/demo_model/train.py                                     # a few minutes on a GPU
    python examples/demo_model/train.py --out smoke --steps 20 --batch 2    # a smoke run on a CPU
    python examples/demo_model/train.py --measure                           # only measure the model that is there

The corpus has two kinds of documents, so that "code" and "prose" become two directions inside the model:

* *code*: the library's source files as they are (without tests, encoding tables and generated files);
* *prose*: what the same files say in words. One document for each file, made of its docstrings, and one for each topic
  of ``pydoc_data.topics``; examples, grammars and tables are left out and indentation is taken off.

One file in twenty (chosen by the hash of its name, its docstrings with it) is held out. Documents are separated by an
end-of-text token. Everything is written under ``--out``::

    corpus.json    the files, their sizes, one SHA-256 over all of them, the Python version
    metrics.json   losses, the score's accuracy, the score of what the model writes
    score.json     the code score (see score.py)
    prompts.txt    50 prompts from held-out documents, one JSON string a line: 25 code beginnings, then 25 prose ones
    model/         the Hugging Face folder

A second run on the same Python reaches the same losses and scores, but not the same bits: kernels differ.

Needs torch, transformers, tokenizers, safetensors and NumPy, and no network.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import inspect
import json
import math
import platform
import re
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

# isort: split
from score import CodeScore, excerpts

Kind = Literal["code", "prose"]
KINDS: tuple[Kind, Kind] = ("code", "prose")

# --------------------------------------------------------------------------------------------------------- the corpus

#: Folders of the standard library that are left out: tests, what is installed beside it, and tables of code points.
EXCLUDED_FOLDERS = {"__pycache__", "encodings", "idle_test", "lib-dynload", "site-packages", "test", "tests"}
#: Files that hold tables, or that the build of this very interpreter generated.
EXCLUDED_FILES = re.compile(
    r"_sysconfigdata.*|config-[^/]*/.*|stringprep\.py|html/entities\.py|re/_casefix\.py|msilib/(schema|sequence|text)\.py"
    r"|pydoc_data/topics\.py|sitecustomize\.py|_distutils_system_mod\.py"
)
TOPICS_FILE = "pydoc_data/topics.py"

HELD_OUT_ONE_IN = 20
MIN_PROSE_CHARACTERS = 200


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    kind: Kind
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is kept out of training: a property of its name, so that a file's two go together."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def source_files(stdlib: Path) -> list[Path]:
    """Return the files of the corpus, relative to ``stdlib`` and sorted."""
    found = []
    for path in stdlib.rglob("*.py"):
        relative = path.relative_to(stdlib)
        if EXCLUDED_FOLDERS.isdisjoint(relative.parts) and not EXCLUDED_FILES.fullmatch(relative.as_posix()):
            found.append(relative)
    return sorted(found, key=lambda path: path.as_posix())


#: What no paragraph of prose has: prompts, statements, grammar rules, rulers.
NOT_PROSE = re.compile(
    r"^\s*(>>>|\.\.\. |\$ |@|(def|class) .*:$|(import|return) [\w.]+$|[\w.]+ = )|::=|[=*~^-]{4,}", re.MULTILINE
)


def is_prose(paragraph: str) -> bool:
    """Tell sentences from examples, grammars, signatures and tables."""
    if len(paragraph.split()) < 6 or NOT_PROSE.search(paragraph):
        return False
    plain = sum(character.isalpha() or character in " \n.,'" for character in paragraph)
    return plain >= 0.9 * len(paragraph)


def as_prose(text: str) -> str:
    """Return the paragraphs of ``text`` that are prose, with no indentation."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    unindented = ("\n".join(line.strip() for line in paragraph.strip().splitlines()) for paragraph in paragraphs)
    return "\n\n".join(paragraph for paragraph in unindented if is_prose(paragraph))


def docstrings(source: str) -> str:
    """Return the docstrings of a source file, in its order, as one text of prose."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    texts = (as_prose(ast.get_docstring(node) or "") for node in nodes)
    return "\n\n".join(dict.fromkeys(text for text in texts if text))


def topics(source: str) -> dict[str, str]:
    """Return the topics of ``pydoc_data/topics.py`` without running it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return {str(name): str(text) for name, text in ast.literal_eval(node.value).items()}
    return {}


def read_corpus(stdlib: Path) -> tuple[list[Document], dict[str, Any]]:
    """Read the documents of both kinds, and a manifest by which one corpus can be told from another."""
    documents: list[Document] = []
    sizes: dict[str, int] = {}
    digest = hashlib.sha256()
    for path in [*source_files(stdlib), Path(TOPICS_FILE)]:
        name = path.as_posix()
        content = (stdlib / path).read_bytes()
        sizes[name] = len(content)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        source = content.decode("utf-8", errors="replace").replace("\r\n", "\n")
        if name == TOPICS_FILE:
            documents += [Document("prose", f"topic:{key}", as_prose(text)) for key, text in topics(source).items()]
        elif source.strip():
            documents.append(Document("code", name, source))
            documents.append(Document("prose", name, docstrings(source)))
    documents = [x for x in documents if x.kind == "code" or len(x.text) >= MIN_PROSE_CHARACTERS]
    manifest = {
        "sha256": digest.hexdigest(),
        "bytes": sum(sizes.values()),
        "documents": {kind: sum(x.kind == kind for x in documents) for kind in KINDS},
        "characters": {kind: sum(len(x.text) for x in documents if x.kind == kind) for kind in KINDS},
        "held_out": sorted({x.name for x in documents if x.held_out}),
        "files": dict(sorted(sizes.items())),
    }
    return documents, manifest


# ------------------------------------------------------------------------------------------------------ the tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCABULARY = 4096

#: A line break with the indentation that follows it is one piece, and a word takes the one space before it.
PIECES = r"\n+[ \t]*| ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+|\s+"

#: Messages become blocks of plain text under headings that look like comments: this model knows no dialogue.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer's files as transformers reads them. Prompts are taken as they are: no token is added."""
    # The same JSON that tokenizer.save() writes, without its white space.
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact, encoding="utf-8")
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- the data


@dataclass
class Split:
    """Tokenised documents, each with the end-of-text token before it."""

    documents: list[np.ndarray[Any, np.dtype[np.int64]]] = field(default_factory=list)

    @classmethod
    def encode(cls, tokenizer: Tokenizer, texts: Sequence[str]) -> Split:
        """Tokenise ``texts``."""
        encodings = tokenizer.encode_batch(list(texts))
        return cls([np.asarray([END_OF_TEXT_ID, *encoding.ids], dtype=np.int64) for encoding in encodings])

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return sum(len(document) for document in self.documents)

    def windows(self, length: int, rng: np.random.Generator | None = None) -> torch.Tensor:
        """Return the documents end to end, in a random order if ``rng`` is given, cut into windows of ``length``.

        A window may begin anywhere in a document, so the model learns to go on from a prompt with nothing before it.
        """
        order = np.arange(len(self.documents)) if rng is None else rng.permutation(len(self.documents))
        stream = np.concatenate([self.documents[i] for i in order])
        count = max(1, len(stream) // length)
        cut = stream[: count * length].reshape(count, -1)
        return torch.from_numpy(cut if rng is None else cut[rng.permutation(count)])

    def batches(self, batch: int, length: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
        """Yield batches for ever; every pass over the documents has another order and other window borders."""
        while True:
            windows = self.windows(length, rng)
            for first in range(0, len(windows) - batch + 1, batch):
                yield windows[first : first + batch]


# ---------------------------------------------------------------------------------------------------------- the model


def build_model(max_length: int) -> LlamaForCausalLM:
    """Return the model, with random weights in float32: 8 layers, 4 heads of 64, 2 of them for keys and values."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Drop parts of what each attention and MLP block adds to the residual stream, in training only.

    The corpus is small and seen many times. These hooks are no part of what is saved.
    """

    def drop(module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(output, probability, training=module.training)

    for name, module in model.named_modules():
        if name.endswith((".o_proj", ".down_proj", ".embed_tokens")):
            module.register_forward_hook(drop)


def optimizer_for(model: nn.Module, rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return fused AdamW which decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a linear warm-up over the first twentieth, then a cosine down to a twentieth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which forward passes run: matrix products in bfloat16."""
    return torch.autocast(device.type, dtype=torch.bfloat16)


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, device: torch.device, length: int, batch: int, most: int = 100) -> float:
    """Return the mean loss per token, in nats, over at most ``most`` windows of a split in its own order."""
    model.eval()
    windows = split.windows(length)[:most]
    total = 0.0
    for first in range(0, len(windows), batch):
        ids = windows[first : first + batch].to(device)
        with autocast(device):
            total += float(model(input_ids=ids, labels=ids).loss) * len(ids)
    model.train()
    return total / len(windows)


def train(
    model: LlamaForCausalLM, data: Split, held_out: dict[Kind, Split], device: torch.device, args: argparse.Namespace
) -> float:
    """Train ``model`` and return the mean training loss of the last hundred steps."""
    add_dropout(model, args.dropout)
    model.to(device).train()
    runner: nn.Module = torch.compile(model) if args.compile else model  # type: ignore[assignment]
    optimizer = optimizer_for(model, args.rate, args.weight_decay)
    batches = data.batches(args.batch, args.length, np.random.default_rng(args.seed))
    recent: list[torch.Tensor] = []
    began = time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args.steps, args.rate)
        ids = next(batches)
        ids = (ids.pin_memory() if device.type == "cuda" else ids).to(device, non_blocking=True)
        with autocast(device):
            loss = runner(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], loss.detach()]
        done = step + 1
        if done % args.report == 0 or done == args.steps:
            seconds = time.monotonic() - began
            line = f"step {done:5d}/{args.steps}  loss {float(torch.stack(recent).mean()):.3f}"
            if done % (5 * args.report) == 0 or done == args.steps:
                for kind, split in held_out.items():
                    line += f"  held-out {kind} {evaluate(model, split, device, args.length, args.batch):.3f}"
            rate = done * args.batch * args.length / seconds
            print(f"{line}  {rate / 1000:.0f}k tokens/s  {seconds:.0f} s", flush=True)
    return float(torch.stack(recent).mean())


# -------------------------------------------------------------------------------------------------------- the prompts

PROMPTS_PER_KIND = 25
PROMPT_TOKENS = range(8, 25)


def signatures(source: str) -> Iterator[str]:
    """Yield the first lines of a file's functions and classes, up to the colon, with no indentation."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
            text = "\n".join(line.strip() for line in lines)
            if text.endswith(":") and "\n" not in text:
                yield text


def beginning(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """Return the first words of ``text``, about ``tokens`` tokens of them, with no white space at the end."""
    cut = tokenizer.encode(text).offsets[:tokens][-1][1]
    while cut < len(text) and not text[cut].isspace():
        cut -= 1
        if cut <= 0:
            return ""
    return text[:cut].rstrip()


def make_prompts(tokenizer: Tokenizer, documents: Sequence[Document], seed: int) -> list[str]:
    """Return beginnings from held-out documents: of code (half of them a file's, half a function's), then of prose."""
    rng = np.random.default_rng(seed)
    held_out = [document for document in documents if document.held_out]
    order = [held_out[i] for i in rng.permutation(len(held_out))]

    def fits(text: str) -> bool:
        return text.isascii() and not text.startswith("<") and len(tokenizer.encode(text).ids) in PROMPT_TOKENS

    files, functions, prose, more_prose = [], [], [], []
    for document in order:
        if document.kind == "prose":
            prose.append(beginning(tokenizer, document.text, int(rng.integers(9, 18))))
            paragraphs = document.text.split("\n\n")[3:5]
            more_prose += [beginning(tokenizer, text, int(rng.integers(9, 18))) for text in paragraphs]
        else:
            files.append(beginning(tokenizer, document.text, int(rng.integers(10, 21))))
            found = [text for text in dict.fromkeys(signatures(document.text)) if fits(text)]
            functions += [found[i] for i in rng.permutation(len(found))[:2]]
    files = [text for text in dict.fromkeys(files) if fits(text)][: PROMPTS_PER_KIND // 2]
    functions = list(dict.fromkeys(functions))[: PROMPTS_PER_KIND - len(files)]
    prose = [text for text in dict.fromkeys(prose + more_prose) if fits(text)][:PROMPTS_PER_KIND]
    assert len(files + functions) == len(prose) == PROMPTS_PER_KIND, "too few held-out documents"
    return files + functions + prose


@torch.no_grad()
def continuations(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, seed: int, temperature: float
) -> list[str]:
    """Return what ``model`` writes after each prompt, sampled; the prompts are left-padded into one batch."""
    encodings = [tokenizer.encode(prompt).ids for prompt in prompts]
    longest = max(len(ids) for ids in encodings)
    padded = torch.tensor([[END_OF_TEXT_ID] * (longest - len(ids)) + ids for ids in encodings])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in encodings])
    torch.manual_seed(seed)
    output = model.generate(
        input_ids=padded.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        pad_token_id=END_OF_TEXT_ID,
    )
    return [tokenizer.decode(ids[longest:].tolist(), skip_special_tokens=True) for ids in output]


# ----------------------------------------------------------------------------------------------------------- the whole


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as readable JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights in bfloat16."""
    special = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def texts_of(documents: Sequence[Document], kind: Kind, held_out: bool) -> list[str]:
    """Return the texts of one kind from one side of the split."""
    return [x.text for x in documents if x.kind == kind and x.held_out == held_out]


def build(documents: Sequence[Document], args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Fit the score, train the tokenizer and the model, choose the prompts, write them all; return training's figures.

    It begins with an empty model folder, so that nothing of an earlier run stays behind.
    """
    folder = args.out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    code, prose = (texts_of(documents, kind, held_out=False) for kind in KINDS)
    CodeScore.fit(code, prose).save(args.out / "score.json")

    tokenizer = train_tokenizer([x.text for x in documents if not x.held_out])
    model = build_model(max_length=2048)
    write_tokenizer(tokenizer, folder, max_length=2048)
    prompts = make_prompts(tokenizer, documents, args.seed)
    (args.out / "prompts.txt").write_text("".join(json.dumps(x) + "\n" for x in prompts), encoding="utf-8")

    repeats = {"code": 1, "prose": args.prose_repeats}
    data = Split.encode(tokenizer, [x.text for x in documents if not x.held_out for _ in range(repeats[x.kind])])
    held_out = {kind: Split.encode(tokenizer, texts_of(documents, kind, held_out=True)) for kind in KINDS}
    print(f"{data.tokens:,} tokens a pass, held out {held_out['code'].tokens:,} of code", end=" ")
    print(f"and {held_out['prose'].tokens:,} of prose; {model.num_parameters():,} parameters", flush=True)
    began = time.monotonic()
    last = train(model, data, held_out, device, args)
    write_model(model.to(torch.bfloat16), folder)
    options = ("steps", "seed", "batch", "length", "rate", "weight_decay", "dropout", "prose_repeats")
    return {
        **{name: getattr(args, name) for name in options},
        "tokens_a_pass": data.tokens,
        "passes": round(args.steps * args.batch * args.length / data.tokens, 2),
        "loss_last_100_steps": round(last, 4),
        "seconds": round(time.monotonic() - began),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def measure(documents: Sequence[Document], args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure the files in ``args.out`` as they are loaded again, the weights in bfloat16."""
    folder = args.out / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    score = CodeScore.load(args.out / "score.json")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()  # type: ignore[arg-type]

    loss: dict[str, dict[str, float]] = {"train": {}, "held_out": {}, "held_out_bits_per_character": {}}
    for kind in KINDS:
        for name in ("train", "held_out"):
            texts = texts_of(documents, kind, held_out=name == "held_out")
            split = Split.encode(tokenizer, texts)
            loss[name][kind] = round(evaluate(model, split, device, args.length, args.batch), 4)
        characters = sum(map(len, texts)) / split.tokens
        loss["held_out_bits_per_character"][kind] = round(loss["held_out"][kind] / math.log(2) / characters, 4)
    print(f"loss: {loss}", flush=True)

    code, prose = (texts_of(documents, kind, held_out=True) for kind in KINDS)
    tests = {k: [x for text in texts for x in excerpts(text)] for k, texts in zip(KINDS, (code, prose), strict=True)}
    prompts = [json.loads(line) for line in (args.out / "prompts.txt").read_text(encoding="utf-8").splitlines()]
    model.eval()
    texts = continuations(model, tokenizer, prompts * args.samples, tokens=64, seed=args.seed, temperature=0.8)
    after = np.asarray([score(text) for text in texts]).reshape(args.samples, 2, PROMPTS_PER_KIND).mean(axis=(0, 2))
    scores = {
        "held_out_accuracy_documents": round(score.accuracy(code, prose), 4),
        "held_out_accuracy_excerpts": round(score.accuracy(tests["code"], tests["prose"]), 4),
        "held_out_excerpts": {kind: len(test) for kind, test in tests.items()},
        "held_out_mean": {kind: round(sum(map(score, test)) / len(test), 4) for kind, test in tests.items()},
        "model_after_prompts": dict(zip(KINDS, after.round(4).tolist(), strict=True)),
        "model_samples": len(texts),
    }
    print(f"score: {scores}", flush=True)
    chosen = range(0, len(prompts), 5)
    return {
        "parameters": model.num_parameters(),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "loss": loss,
        "score": scores,
        "samples": [{"prompt": prompts[i], "text": texts[i], "score": round(score(texts[i]), 4)} for i in chosen],
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write (default: this one)")
    parser.add_argument("--measure", action="store_true", help="train nothing: measure what --out holds, and print it")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a window")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--prose-repeats", type=int, default=2, help="how often a pass sees each prose document")
    parser.add_argument("--samples", type=int, default=8, help="continuations of each prompt that are scored")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="the library to read")
    parser.add_argument("--python", default=platform.python_version(), help="the version of Python that --stdlib is of")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--report", type=int, default=50, help="steps between progress lines")
    return parser.parse_args()


def main() -> None:
    """Read the corpus, build everything from it, measure it and write the figures."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    documents, manifest = read_corpus(args.stdlib)
    manifest = {"python": args.python, **manifest}
    print(f"corpus: {len(manifest['files'])} files of CPython {args.python}, sha256 {manifest['sha256'][:16]}")
    if args.measure:
        measure(documents, args, device)
        return
    training = build(documents, args, device)
    write_json(args.out / "corpus.json", manifest)
    figures = measure(documents, args, device)
    identity = {"python": args.python, "corpus_sha256": manifest["sha256"]}
    write_json(args.out / "metrics.json", {**identity, "training": training, **figures})


if __name__ == "__main__":
    main()
