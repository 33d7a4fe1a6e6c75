"""Sequences that workers share (`mesh: {sp: N}`), with models of transformers as they are.

    from elastic.integrations import sequences

    model = LlamaForCausalLM(LlamaConfig(..., attn_implementation="elastic"))
    ...
        logits = engine(**sequences.part(input_ids=tokens, attention_mask=mask)).logits
        engine.backward(sequences.loss(logits, labels))

Importing this module registers the implementation of attention that is called "elastic": torch's
`scaled_dot_product_attention` over whole sequences and this worker's share of the heads. Without `mesh`, it is
transformers' own ("sdpa").
"""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from elastic.core.errors import UsageError
from elastic.training.user import sequence

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise UsageError(
        "elastic.integrations.sequences needs transformers: install the extra `hf` of ray-elastic"
    ) from error

NAME = "elastic"
_IGNORED = -100
# What a part has of each input; the mask stays whole, as attention is over whole sequences.
_SPLIT = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
# What some models add to attention, and would be left out without a word.
_UNKNOWN = ("softcap", "position_bias", "s_aux")


def part(*, attention_mask: torch.Tensor | None = None, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What to call the model with: this worker's part of whole inputs, [batch, sequence, ...], and its positions.

    `attention_mask` is [batch, sequence], zero for padding. Raises UsageError for an input that it does not know, and
    for a length that is not a multiple of the workers that share a sequence.
    """
    unknown = sorted(inputs.keys() - {*_SPLIT})
    if unknown or not inputs:
        raise UsageError(
            f"sequences.part was given {', '.join(unknown) or 'no inputs'}; it takes {', '.join(_SPLIT)} and "
            "attention_mask. Labels go to sequences.loss"
        )
    if "position_ids" not in inputs:
        first = next(iter(inputs.values()))
        inputs["position_ids"] = torch.arange(first.shape[1], device=first.device)[None]
    made = {name: sequence.split(value) for name, value in inputs.items()}
    _Pass.attended = False
    return made if attention_mask is None else {**made, "attention_mask": attention_mask}


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of a causal language model over the tokens of whole sequences, the same on all workers of a cell.

    `logits` are of this worker's part, [batch, part, vocabulary]; `labels` of the whole sequence, not shifted, as
    transformers takes them: each is the label of the token before. -100 does not count. Raises UsageError where the
    model has another attention than "elastic", which would be within parts.
    """
    if sequence.size() > 1 and not _Pass.attended:
        raise UsageError(
            "the model has not attended to whole sequences since sequences.part was called: build it with "
            f'attn_implementation="{NAME}", or leave mesh.sp out'
        )
    own = sequence.split(pad(labels, (0, 1), value=_IGNORED)[..., 1:].contiguous())
    total = cross_entropy(logits.flatten(0, 1).float(), own.flatten(), ignore_index=_IGNORED, reduction="sum")
    return sequence.mean(total, (own != _IGNORED).sum())


class _Pass:
    """Of the process: it makes one forward pass after another."""

    attended = False
    # The position ids that were looked at last: all layers of a pass are given the same tensor.
    places: weakref.ref[torch.Tensor] | None = None


# -- what transformers calls -------------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' `sdpa_attention_forward`, of parts: [batch, heads, part, head size] to [batch, part, heads, ..].

    `attention_mask` is that of `whole_mask`.
    """
    parts = sequence.size()
    if parts == 1:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        return found
    _refuse(module, query, key, given)
    causal = given.get("is_causal")
    local = partial(
        _whole,
        attn_mask=attention_mask,
        dropout_p=given.get("dropout", 0.0),
        scale=given.get("scaling"),
        is_causal=attention_mask is None and bool(getattr(module, "is_causal", True) if causal is None else causal),
    )
    _Pass.attended = True
    seen = sequence.attention(local, query, *(_shareable(tensor, parts) for tensor in (key, value)))
    return seen.transpose(1, 2).contiguous(), None


def whole_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **given: Any,
) -> torch.Tensor | None:
    """As transformers' `sdpa_mask`; of parts, the mask of whole sequences, from the whole `attention_mask`."""
    parts, offsets = sequence.size(), {"q_offset": q_offset, "kv_offset": kv_offset}
    if parts > 1:
        if not allow_is_causal_skip:
            raise UsageError(
                'attn_implementation="elastic": the model adds a mask of its own (several texts packed into a '
                "sequence, say), which is of this worker's part only; give one text per sequence, or leave mesh.sp out"
            )
        if attention_mask is not None and attention_mask.shape[-1] != q_length * parts:
            raise UsageError(
                f"attention_mask has {attention_mask.shape[-1]} places and whole sequences have {q_length * parts}: "
                "give it whole (sequences.part does)"
            )
        q_length = kv_length = q_length * parts
    mask: torch.Tensor | None = sdpa_mask(
        batch_size, q_length, kv_length, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
        **offsets, **given,
    )  # fmt: skip
    return mask


def _whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, enable_gqa=key.shape[1] != query.shape[1], **given)


def _shareable(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """Heads of keys or values, each as often as it takes for every worker to have those of its queries."""
    times = parts // math.gcd(tensor.shape[1], parts)
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _refuse(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, given: dict[str, Any]) -> None:
    added = [name for name in _UNKNOWN if given.get(name) is not None]
    if added:
        raise UsageError(
            f'attn_implementation="elastic": attention of {type(module).__name__} has {", ".join(added)}, which is not '
            "supported over shared sequences; leave mesh.sp out"
        )
    if key.shape[2] != query.shape[2]:
        raise UsageError(
            f'attn_implementation="elastic": {key.shape[2]} keys for {query.shape[2]} queries: a cache of keys and '
            "values, or the keys of another sequence, cannot be shared; leave mesh.sp out where the model generates"
        )
    _require_places(module, given.get("position_ids"), query.shape[2])


def _require_places(module: torch.nn.Module, places: torch.Tensor | None, length: int) -> None:
    """A model that is given no positions counts each part from 0, and nothing else would tell."""
    if places is not None and _Pass.places is not None and _Pass.places() is places:
        return
    begin = sequence.rank() * length
    if places is None or not (places == torch.arange(begin, begin + length, device=places.device)).all():
        what = "is given no position ids" if places is None else "is given other position ids than its tokens' places"
        raise UsageError(
            f'attn_implementation="elastic": {type(module).__name__} {what}, {begin} to {begin + length - 1} on this '
            "worker: call the model with what sequences.part gives, and with one text per sequence"
        )
    _Pass.places = weakref.ref(places)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, whole_mask)
