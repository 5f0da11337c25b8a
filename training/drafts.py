"""Drafts made and kept: of which shape, from which vocabulary and weights; checkpoints, exports and imports on disk."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.files import check_finite, naming, read_json, reason_of, remove, replace_with, to_json, weight_map
from data.packing import PACKING
from data.vocabulary import draft_vocabulary, draft_vocabulary_map
from draft_deepseek import (
    DeepseekV3Eagle3DraftModel,
    Eagle3MLAConfig,
    export_config,
    export_state,
    import_state,
    rope_frequencies,
)
from draft_kimi_k3 import KimiK3Eagle3DraftModel
from target.model import check_counts, check_target_config, default_aux_layers
from training.sources import Source

# ------------------------------------------------------------------------------------------------------------- presets

Q_LORA_RANK = 1536  # of a draft whose target has none (DeepSeek-V2-Lite, Moonlight)
MLA = {
    "q_lora_rank": Q_LORA_RANK,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
SITU = {"mla_use_nope": True, "mla_use_output_gate": True}
SITU |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}


def preset(layers, vocab, heads, intermediate, eps, longest, pad, bos, eos, **more) -> dict:
    """What the config.json of a real target says to its draft; all are 7168 wide."""
    return {
        "hidden_size": 7168,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "rms_norm_eps": eps,
        "max_position_embeddings": longest,
        "pad_token_id": pad,
        "bos_token_id": bos,
        "eos_token_id": eos,
        **MLA,
        **more,
    }


def yarn(theta: float, factor: float, beta_fast: float) -> dict:
    return {"rope_theta": theta, "rope_scaling": YARN | {"factor": factor, "beta_fast": beta_fast, "beta_slow": 1.0}}


KIMI = 163839, 163584  # pad, bos
# Of the first release of each: DeepSeek-V3 (R1, V3.1 and V3.2 have its shape), Kimi K2 of July 2025 (K2-0905 and
# K2-Thinking go on to 262,144 by factor 64), K2.5 (K2.6 has its shape), K3. What --model says comes first.
PRESETS = {
    "deepseek-v3": preset(61, 129280, 128, 18432, 1e-6, 163840, None, 0, 1, **yarn(1e4, 40.0, 32.0)),
    "kimi-k2": preset(61, 163840, 64, 18432, 1e-6, 131072, *KIMI, 163585, **yarn(5e4, 32.0, 1.0)),
    "kimi-k2.5": preset(61, 163840, 64, 18432, 1e-5, 262144, *KIMI, 163585, **yarn(5e4, 64.0, 1.0)),
    "kimi-k3": preset(93, 163840, 96, 33792, 1e-5, 1048576, *KIMI, 163586, **SITU),
}
REQUIRED = Eagle3MLAConfig.required_keys()  # what a target's config.json does not say, its preset does
# The draft that engines serve for a NoPE target. Such a target names no angles: these are Kimi K2's, unscaled.
ROPE_FOR_K3 = {"mla_use_nope": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
SHAPE_FOR_K3 = {"num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432}

# ---------------------------------------------------------------------------------------------------------- a new draft


def make_draft(args, source: Source, default_vocab: int, checkpoint: Path | None = None) -> nn.Module:
    """The draft to train, in float32 on args.device, its embedding the target's and frozen.

    It starts from `--init`, or afresh with the chosen rows of the target's head. checkpoint: one that will be loaded,
    whose draft vocabulary it is, whatever the data say now. ValueError: whatever does not fit.
    """
    start = None if args.init is None else Path(args.init)
    config = draft_config(args, source, read_config_beside(start) if start else None)
    if checkpoint is not None and args.q_lora_rank is None:  # runs begun when targets without one had drafts without
        config["q_lora_rank"] = (read_config(checkpoint) or config).get("q_lora_rank")
    embedding = source.embed_tokens
    ids = choose_vocabulary(args, source, checkpoint or start, default_vocab)
    state = None if start is None else read_state(start)
    draft = new_draft(config | {"draft_vocab_size": len(ids)}, state)
    draft.set_vocab_mapping(ids)
    if start is not None:
        check_rope(draft, source)
        load_into(draft, start, state, embedding.weight.float().cpu())
    elif source.lm_head is not None:
        with torch.no_grad():
            draft.lm_head.weight.copy_(source.lm_head.weight[ids.to(source.lm_head.weight.device)])
    draft.copy_embeddings_from_target(embedding)
    draft.freeze_embeddings()
    return draft.to(args.device)


def new_draft(config: dict, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """An untrained draft, of the kind and shape that a config.json says. ValueError: a value that cannot be, or sizes
    far from those of the weights that it is for."""
    check_config(config)
    nope = has_no_rope(config)
    kind, config = KimiK3Eagle3DraftModel if nope else DeepseekV3Eagle3DraftModel, config | {"mla_use_nope": nope}
    try:
        if weights is not None:  # before memory is taken
            with torch.device("meta"):
                shell = kind(config)
            wanted = count(shell.state_dict()) - shell.model.embed_tokens.weight.numel()  # which may be the target's
            if wanted > 2 * count(weights):
                raise ValueError(f"its config.json says {wanted:,} weights, {count(weights):,} are there")
        return kind(config)
    except RuntimeError as error:  # no memory for it
        raise ValueError(f"a draft of this config.json cannot be made ({reason_of(error)})") from error


def count(state: dict[str, Tensor]) -> int:
    return sum(x.numel() for x in state.values())


def has_no_rope(config: dict) -> bool:
    """Which of the two kinds of attention: by `mla_use_nope`, which exports without it settle by their model_type."""
    nope = config.get("mla_use_nope")
    return config.get("model_type") == "kimi_k3" if nope is None else nope


def draft_config(args, source: Source, start: dict | None) -> dict:
    """Keys of the draft's config: the target's, or the preset's where no target is given; a draft to start from fixes
    its own shape, what is the target's stays the target's."""
    target = source.config or PRESETS[args.target]
    known = {"hidden_size": source.hidden_size, "vocab_size": source.vocab_size}
    if wrong := [f"{key} {x}, not {target[key]}" for key, x in known.items() if target[key] != x]:
        raise ValueError(f"the data has {', '.join(wrong)} as --target {args.target} has; give its --model")
    lacking = {key: x for key, x in PRESETS[args.target].items() if target.get(key) is None and key in REQUIRED}
    config = target | (lacking if target["hidden_size"] == PRESETS[args.target]["hidden_size"] else {})
    nope = has_no_rope(config) if args.draft == "auto" else args.draft == "kimi-k3"
    if has_no_rope(config) and not nope:
        config |= ROPE_FOR_K3 | ({} if source.is_tiny else SHAPE_FOR_K3)
    config |= asked_shape(args, config, start)
    if start is not None:
        check_start(start, nope, source, target)
        rotates = any(start.get(key) for key in rope_of(start))
        config = {key: x for key, x in config.items() if not (rotates and key in rope_of(start))}
        config |= {key: x for key, x in start.items() if key not in ("max_position_embeddings", "vocab_size")}
    is_default = tuple(source.aux_layers) == default_aux_layers(target["num_hidden_layers"])
    return config | {
        "mla_use_nope": nope,
        "target_hidden_size": source.hidden_size,
        "num_aux_hidden_states": len(source.aux_layers),
        "fc_norm": config.get("fc_norm", False) or args.fc_norm,
        "norm_output": config.get("norm_output", False) or args.norm_output,
        "eagle_aux_hidden_state_layer_ids": None if is_default else [j + 1 for j in source.aux_layers],  # as engines do
    }


def asked_shape(args, config: dict, start: dict | None) -> dict:
    """Sizes that the options ask for, or that a target of `config` lacks: engines load no draft without q_lora_rank.
    ValueError: a draft to start from has others."""
    heads = args.heads
    asked = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": args.intermediate_size}
    asked = {key: size for key, size in asked.items() if size is not None}
    if args.q_lora_rank is not None:
        asked["q_lora_rank"] = args.q_lora_rank or None
    if start is None:
        lacking = {} if config.get("q_lora_rank") else {"q_lora_rank": min(Q_LORA_RANK, config["hidden_size"])}
        return lacking | asked
    if wrong := [f"{key} {start[key]}, not {size}" for key, size in asked.items() if start.get(key, size) != size]:
        raise ValueError(f"--init has {', '.join(wrong)} as the options ask; leave them out, or begin without --init")
    return {}


def check_start(start: dict, nope: bool, source: Source, target: dict) -> None:
    """ValueError unless a draft to start from is of the kind, vocabulary and layers that are trained on."""
    if has_no_rope(start) != nope:
        kinds, option = ("has RoPE", "has none (mla_use_nope)"), "deepseek" if nope else "kimi-k3"
        raise ValueError(
            f"--init {kinds[not nope]}, the draft to train {kinds[nope]}; --draft {option} goes on with it"
        )
    if start.get("vocab_size", source.vocab_size) != source.vocab_size:
        raise ValueError(f"--init is a draft for {start['vocab_size']} tokens, the target has {source.vocab_size}")
    named = start.get("eagle_aux_hidden_state_layer_ids")
    named = (start.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") if named is None else named
    outputs, inputs = list(source.aux_layers), [j + 1 for j in source.aux_layers]
    held = [j + 1 for j in default_aux_layers(target["num_hidden_layers"])] if named is None else sorted(named)
    # Engines count by input; some trainers' drafts count by output, which only ids that begin with 1 can mean.
    if held != inputs and not (held[:1] == [1] and held == outputs):
        raise ValueError(
            f"--init was trained on the layers {held}{' (the default)' if named is None else ''}, counted as engines "
            f"do, the data has {inputs}; capture its layers (--aux-layers counts one less), or take another draft"
        )


SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank")
SIZES += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings", "target_hidden_size")
SIZES += ("draft_vocab_size", "num_aux_hidden_states")
NUMBERS = ("rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta")
ROPE_NUMBERS = ("factor", "beta_fast", "beta_slow")
SWITCHES = ("fc_norm", "norm_output", "mla_use_nope", "mla_use_output_gate", "tie_word_embeddings")


def check_config(config: dict) -> None:
    """ValueError: a value of a draft's config that is of another type, or no size, that nothing could be built from."""
    check_target_config(config)  # of the same keys
    check_counts(config, SIZES)
    check_numbers(config, NUMBERS)
    rope = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise ValueError(f"{name} is {config[name]!r}; a table or null is wanted")
    for form in (rope, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        check_counts(form, ("original_max_position_embeddings",))
        check_numbers(form, ROPE_NUMBERS)
        check_numbers(form, ("rope_theta",), above=1)
        check_numbers(form, ("mscale", "mscale_all_dim"), above=-1)
    check_numbers(config, ("initializer_range",), above=-1)
    for key in SWITCHES:
        if not isinstance(config.get(key), bool | None):
            raise ValueError(f"{key} is {config[key]!r}; true or false is wanted")
    if not isinstance(config.get("eagle_config"), dict | None):
        raise ValueError(f"eagle_config is {config['eagle_config']!r}; a table or null is wanted")
    for where in (config, config.get("eagle_config") or {}):
        ids = where.get("eagle_aux_hidden_state_layer_ids")
        if ids is not None and not (isinstance(ids, list) and all(type(j) is int for j in ids)):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids is {ids!r}; a list of layers is wanted")


def check_numbers(config: dict, keys, above: float = 0) -> None:
    for key in keys:
        x = config.get(key)
        if x is not None and (type(x) not in (int, float) or not above < x < 1e12):
            raise ValueError(f"{key} is {x!r}; a number above {above} is wanted")


def choose_vocabulary(args, source: Source, start: Path | None, default_vocab: int) -> Tensor:
    """Target ids [Vd] of the draft vocabulary: the data's where it is bound to one, that of the draft to start from, a
    map's, or counted."""
    v, asked = source.vocab_size, args.draft_vocab
    mapped = None if asked is None or str(asked).isdecimal() else draft_vocabulary_map(asked, v)
    bound = source.draft_ids if source.draft_ids is not None else start and ids_of(start, v)
    if bound is not None:
        size = len(bound) if asked is None else len(mapped) if mapped is not None else int(asked) or v
        if size != len(bound) or mapped is not None and not torch.equal(mapped, bound.sort().values):
            raise ValueError(
                f"--draft-vocab is {asked}, but the data, --init or the run is bound to one of {len(bound)} tokens"
            )
        return bound
    if mapped is not None:
        return mapped
    size = min(default_vocab, v) if asked is None else int(asked)
    return torch.arange(v) if size == 0 else draft_vocabulary(source.training, size, source.special_token_ids, v)


def ids_of(start: Path, vocab_size: int) -> Tensor:
    """The draft vocabulary of a draft on disk: its d2t, or all of its head's rows."""
    state = {name.removeprefix("model."): x for name, x in read_state(start).items()}
    if "lm_head.weight" not in state:
        raise ValueError(f"{start} holds no lm_head.weight, but {sorted(state)[:5]}; is it a draft?")
    size = len(state["lm_head.weight"])
    if "d2t" not in state and size < vocab_size:
        raise ValueError(f"{start} says {size} of {vocab_size} tokens and lacks d2t, which says what they are")
    offsets = state.get("d2t", torch.zeros(size))
    if list(offsets.shape) != [size]:
        raise ValueError(f"{start} has a d2t of shape {list(offsets.shape)} for {size} tokens; copy it again")
    return offsets.long() + torch.arange(size)


def check_rope(draft: nn.Module, source: Source) -> None:
    """ValueError unless a draft to start from rotates and scales as one made for the target does."""
    target = source.config
    if target is None or has_no_rope(target) or has_no_rope(draft.config.to_dict()):
        return
    mine, wanted = draft.config, draft.config_class.from_any(draft.config.to_dict() | rope_of(target))
    attention = type(draft.model.layers[0].self_attn)
    (f, x), (g, y) = rope_frequencies(mine), rope_frequencies(wanted)
    if not torch.equal(f, g) or x != y or attention.softmax_scale(mine) != attention.softmax_scale(wanted):
        raise ValueError(
            f"--init rotates by {mine.rope_parameters}, its target by {wanted.rope_parameters}; take a draft of this "
            "target, or correct its config.json"
        )


def rope_of(config: dict) -> dict:
    return {key: config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")}


# ---------------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(run: Path, draft: nn.Module, optimizer, step: int, consumed: int, keep: int) -> None:
    """checkpoints/step-<n>: the draft (float32) and all else that training goes on from; whole or absent.

    OSError: it cannot be written; ValueError: its numbers are of no use. What was saved before stays.
    """
    state = {"step": step, "consumed": consumed, "packing": PACKING, "rng": torch.get_rng_state()}
    state["optimizer"] = optimizer.state_dict()
    final = run / "checkpoints" / f"step-{step:08d}"
    with naming(final, "it is not written; --resume goes on from the one before, a smaller --lr may help"):
        check_finite([*draft.state_dict().items(), *moments(state["optimizer"])])

    def write(half: Path) -> None:
        draft.save_pretrained(half)
        torch.save(state, half / "training.pt")

    final.parent.mkdir(exist_ok=True)
    replace_with(final, write, "; --resume goes on from the checkpoint before it")
    for old in checkpoints(run)[:-keep]:
        remove(old)


def moments(optimizer_state: dict):
    """(name, tensor) of all that AdamW keeps."""
    for i, kept in optimizer_state["state"].items():
        yield from ((f"{name} of parameter {i}", x) for name, x in kept.items())


def checkpoints(run: Path) -> list[Path]:
    """Those of a run, the newest last; whatever else lies beside them is not ours."""
    found = (run / "checkpoints").glob("step-*")
    return sorted(x for x in found if re.fullmatch(r"step-\d{8}", x.name) and x.is_dir())


def newest_checkpoint(run: Path) -> Path | None:
    return max(checkpoints(run), default=None)


def load_checkpoint(run: Path, draft: nn.Module, optimizer, device) -> tuple[int, int]:
    """Load the newest checkpoint of the run, if it has one; how many steps are done and micro-batches consumed."""
    newest = newest_checkpoint(run)
    if newest is None:
        return 0, 0
    stored = read_state(newest)
    misfits = [k for k, x in draft.state_dict().items() if k not in stored or stored[k].shape != x.shape]
    if misfits:
        raise ValueError(f"{newest} is another draft's ({', '.join(misfits[:3])} differ); resume with its own settings")
    draft.load_state_dict(stored)
    file, todo = newest / "training.pt", f"remove {newest} to go on from the checkpoint before it"
    with naming(file, todo):
        state = torch.load(file, map_location=device, weights_only=True)
        check_training_state(state, newest, optimizer)
    if state.get("packing") != PACKING:
        raise ValueError(
            f"{newest} counts rows as an older version packed them, so its place in the data is lost; start another "
            f"--name with --init {newest}"
        )
    with naming(file, todo):
        groups = optimizer.state_dict()["param_groups"]  # what the settings say now
        optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        torch.set_rng_state(state["rng"].cpu())
    return state["step"], state["consumed"]


def check_training_state(state, checkpoint: Path, optimizer) -> None:
    """ValueError unless it is what `save_checkpoint` writes for these parameters."""
    keys = {"step": int, "consumed": int, "optimizer": dict, "rng": Tensor}
    if not isinstance(state, dict) or any(type(state.get(key)) is not kind for key, kind in keys.items()):
        raise ValueError(f"it does not hold {', '.join(f'{key}: {kind.__name__}' for key, kind in keys.items())}")
    if f"step-{state['step']:08d}" != checkpoint.name or not 0 <= state["consumed"] < 2**40:
        raise ValueError(f"it says step {state['step']}, {state['consumed']} micro-batches consumed")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, kept in state["optimizer"]["state"].items():
        shapes = {"step": [], "exp_avg": list(parameters[i].shape), "exp_avg_sq": list(parameters[i].shape)}
        if {name: list(x.shape) for name, x in kept.items()} != shapes:
            raise ValueError(f"its optimizer state of parameter {i} is none of AdamW's for {shapes['exp_avg']}")
    check_finite(moments(state["optimizer"]))


def trimmed(path: Path, done: int):
    """A .jsonl file opened to append, without the lines of steps after `done`, which come again."""
    with naming(path, "remove it to go on without"):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
    if kept != lines:
        replace_with(path, lambda half: half.write_text("".join(kept)))
    return path.open("a")


def export(draft: nn.Module, directory: Path, dtype: str) -> None:
    """The directory that engines load; whole or absent. ValueError: there is one already, or the weights are no use."""
    taken = f"{directory} exists already and nothing is overwritten; name another directory"
    if directory.exists():
        raise ValueError(taken)
    config, state = export_config(draft, getattr(torch, dtype)), export_state(draft, getattr(torch, dtype))
    with naming(directory, "it is not written"):
        check_finite(state.items())

    def write(half: Path) -> None:
        half.mkdir()
        (half / "config.json").write_text(to_json(config, indent=2) + "\n")
        save_file(state, half / "model.safetensors", metadata={"format": "pt"})

    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_with(directory, write)
    except OSError:
        if directory.exists():  # another process was faster
            raise ValueError(taken) from None
        raise
    print(f"draft: {directory} ({dtype})")


def load_draft(path) -> nn.Module:
    """A draft in float32 from a checkpoint, an export or a published directory. ValueError: it is none, or damaged."""
    path = Path(path)
    config = read_config(path)
    if config is None:
        raise ValueError(f"{path} is no draft: it has no config.json; give a checkpoint's or an export's directory")
    state = read_state(path)
    with naming(path / "config.json", "copy it again"):
        draft = new_draft(config, state)
    load_into(draft, path, state)
    return draft


def read_config_beside(path: Path) -> dict | None:
    """That of a directory, or of the one a weight file lies in. ValueError: there is nothing at `path`."""
    if not path.exists():
        raise ValueError(f"--init {path} does not exist; give a draft's directory or its .safetensors file")
    return read_config(path if path.is_dir() else path.parent)


def read_config(path: Path) -> dict | None:
    """config.json of a draft's directory; None beside a bare weight file. ValueError: damaged, or not one layer."""
    file = path / "config.json"
    if not file.is_file():
        return None
    config = read_json(file, ())
    with naming(file, "copy it again"):
        check_config(config)
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"{path} has {config['num_hidden_layers']} layers; an EAGLE-3 draft has one, is it a target?")
    return config


def read_state(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory (one safetensors file or shards) or of one file. ValueError: none, damaged, or not
    finite."""
    shards = weight_map(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors") if shards is None else {*shards.values()})
    if not files:
        raise ValueError(f"{path} holds no .safetensors file; give a draft's directory or its weight file")
    state = {}
    for file in files:
        with naming(file, "copy it again, or remove a checkpoint to go on from the one before"):
            found = load_file(file)
            check_finite(found.items())
            state |= found
    return state


def load_into(draft: nn.Module, path: Path, state: dict[str, Tensor], embedding: Tensor | None = None) -> None:
    """Load a draft's tensors, of either naming. An absent t2d follows from d2t, an absent embedding is `embedding`.

    ValueError: what is missing, unexpected or of another shape, by name.
    """
    cfg = draft.config
    names = {name.removeprefix("model."): name for name in state}
    if embedding is not None and "embed_tokens.weight" not in names:
        state["embed_tokens.weight"] = embedding
    with naming(path, "is its config.json its own?"):
        if cfg.draft_vocab_size < cfg.vocab_size and "d2t" in names and "t2d" not in names:
            offsets = state[names["d2t"]].long()
            draft.set_vocab_mapping(offsets + torch.arange(len(offsets)))
            state["t2d"] = draft.t2d
        import_state(draft, state)
        ids = draft.draft_ids
        if ids.min() < 0 or ids.max() >= cfg.vocab_size or ids.unique().numel() != ids.numel():
            raise ValueError(f"its d2t leads to {ids.unique().numel()} tokens, {ids.min()}..{ids.max()}")
