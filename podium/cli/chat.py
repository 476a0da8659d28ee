"""`podium chat`"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from podium.core.errors import ConfigError, ModelError

HELP = "/reset forgets the conversation, /system TEXT sets a system prompt, /quit ends. Ctrl-C stops an answer."


def command(
    model: Annotated[str, typer.Argument(help="Model folder, run folder, hub name or GGUF file.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this one and end (for scripts).")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.", min=0.0, max=1.0)] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="The longest answer, in tokens; by default 512, or what the model has room for.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Makes the answers repeatable.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto.")] = "auto",
) -> None:
    """Talk to a model. Answers appear as they are written.

    In the conversation: /reset, /system TEXT, /help, /quit.

    [bold]Examples[/bold]

      podium chat runs/quickstart-grpo/grpo

      podium chat ./my-model --prompt "What is 17 + 25?" --temperature 0
    """
    from podium.models.loading import load_causal_lm, load_tokenizer

    path, device = _model_path(model), _device(device)
    tokenizer = load_tokenizer(path)
    model_ = load_causal_lm(path, dtype=dtype, device=device)
    chat = Chat(
        model_,
        tokenizer,
        system=system,
        sampling={"do_sample": temperature > 0, "max_new_tokens": max_new_tokens or _room(model_)}
        | ({"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}),
    )
    _seed(seed)
    if prompt is not None:
        chat.answer(prompt, _write)
        print()
        return
    if not chat.has_template:
        print("This tokenizer has no chat template: your text is continued as it is, without history.", file=sys.stderr)
    _converse(chat)


def _room(model: Any) -> int:
    """The default length of an answer: 512 tokens, and never more than half of what the model can hold."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return 512 if most is None else min(512, most // 2)


def _model_path(model: str) -> str:
    """A run folder stands for the model in it."""
    path = Path(model)
    if (path / "settings.yaml").is_file():
        if not (path / "model" / "config.json").is_file():
            raise ConfigError(f"the run '{model}' has no trained model yet", where="MODEL", remedy="finish the run first")
        return str(path / "model")
    return model


def _device(name: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise ConfigError(f"device '{name}' was asked for, but torch sees no GPU", where="--device", remedy="use --device cpu")
    return ("cuda" if available else "cpu") if name == "auto" else name


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _converse(chat: Chat) -> None:
    """Reads lines until /quit or the end of the input."""
    asks = sys.stdin.isatty()
    if asks:
        import readline  # noqa: F401  (line editing and history for input())

        print(HELP)
    while True:
        try:
            text = input("\n> " if asks else "").strip()
        except EOFError:
            return
        if text in ("/quit", "/exit"):
            return
        if text.startswith("/"):
            print(_obey(chat, text))
        elif text:
            chat.answer(text, _write)
            print()


def _obey(chat: Chat, text: str) -> str:
    name, _, rest = text.partition(" ")
    if name == "/reset":
        chat.reset()
        return "(forgotten)"
    if name == "/system":
        chat.system = rest.strip() or None
        chat.reset()
        return f"(system prompt {'set' if chat.system else 'removed'}; conversation forgotten)"
    return HELP


class Chat:
    """A conversation with a model, through `transformers`' own `generate`.

    Args:
        model, tokenizer: as `podium.models.loading` gives them.
        system: put before the conversation.
        sampling: keywords of `generate`; `max_new_tokens` is required.
    """

    def __init__(self, model: Any, tokenizer: Any, *, system: str | None, sampling: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.system, self.sampling = model, tokenizer, system, sampling
        self.has_template = bool(tokenizer.chat_template)
        self.turns: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forgets the conversation."""
        self.turns = []

    def answer(self, text: str, write: Callable[[str], None]) -> str:
        """The model's answer, handed to `write` piece by piece. Ctrl-C ends it early; what was written stays.

        Raises ModelError where the text alone is longer than the model can read.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            ids = self._fit()
        except ModelError:
            self.turns.pop()
            raise
        stream = _stream(self.tokenizer, write)
        try:
            self._generate(ids, stream)
        except KeyboardInterrupt:
            write(" ...")
        written = "".join(stream.pieces)
        self.turns.append({"role": "assistant", "content": written})
        return written

    def _generate(self, ids: Any, stream: Any) -> None:
        import torch

        ends = {self.tokenizer.eos_token_id}
        own = self.model.generation_config.eos_token_id
        ends.update(own if isinstance(own, list) else [own])
        ids = ids.to(self.model.device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            eos_token_id=sorted(end for end in ends if end is not None),
            pad_token_id=self.tokenizer.pad_token_id,
            streamer=stream,
            **self.sampling,
        )

    def _fit(self) -> Any:
        """Token ids `[1, T]` of the conversation; its oldest turns are left out where it is too long for the model."""
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        while True:
            ids = self._encode()
            if room is None or ids.shape[1] + self.sampling["max_new_tokens"] <= room:
                return ids
            if len(self.turns) < 3:
                raise ModelError(
                    f"{ids.shape[1]} tokens and {self.sampling['max_new_tokens']} new ones are more than the model's {room}",
                    where="chat",
                    remedy="shorten the text, or lower --max-new-tokens",
                )
            del self.turns[:2]

    def _encode(self) -> Any:
        if not self.has_template:
            before = f"{self.system}\n" if self.system else ""
            return self.tokenizer(before + self.turns[-1]["content"], return_tensors="pt")["input_ids"]
        head = [{"role": "system", "content": self.system}] if self.system else []
        encoded = self.tokenizer.apply_chat_template(
            head + self.turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return encoded["input_ids"]


def _stream(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """A `transformers` streamer that passes text on as it is finished, and keeps it in `pieces`."""
    from transformers import TextStreamer

    class Stream(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.pieces: list[str] = []

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.pieces.append(text)
            write(text)

    return Stream()
