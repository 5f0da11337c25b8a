"""Captured hidden states, read in the layouts of this and other tools.

    captured = open_captured(directory, load_ends(target_directory))
    captured.documents                  # unshifted tokens and loss masks, known up front from headers and indices
    captured.states(documents)          # their (features, last), read from disk now
    captured.head                       # turns `last` into logits over the target's vocabulary

Shapes, in all files of this folder: S tokens of a document, H the target's hidden size, V its vocabulary, Vd the
draft's, W the width of `last`: H behind the final norm, or Vd + 1 where a cache carries the teacher itself
(`AutoModelCache`). Layers are named by output, as in target/model.py: j is the residual stream behind 0-based decoder
layer j.
"""

from pathlib import Path

from states.automodel import AutoModelCache
from states.captured import Captured
from states.layer_files import ConnectorFiles, OwnCapture, SpeculatorsFiles
from states.specforge import SpecForgeFiles

KINDS = (OwnCapture, AutoModelCache, SpecForgeFiles, SpeculatorsFiles, ConnectorFiles)


def open_captured(directory, ends=None, aux_layers=None, masks=None, skip_damaged=False) -> Captured:
    """The captured states in `directory`, of the kind that its files show. Opening reads headers, not the states.

    ends: the `TargetEnds` they were captured from (a `Target` will do for our own and SpecForge's, which are normed);
    needed but for AutoModel caches. aux_layers: the output ids wanted, None for the default ones of the target's depth;
    vLLM's and speculators' files do not say which they hold and are taken at your word. masks: loss masks by
    `token_key`, for files that carry none. skip_damaged: count files that cannot be used in `skipped` instead of
    raising. ValueError: no directory, files of no kind or of several, other layers, another width, a damaged file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; give the folder that holds the captured states")
    found = [(kind, mark) for kind in KINDS if (mark := kind.mark(directory))]
    if len(found) != 1:
        marks = ", ".join(f"{mark} ({kind.kind})" for kind, mark in found) or "no mark of any"
        raise ValueError(
            f"{directory} has {marks}; one kind is wanted: {', '.join(f'{k.kind} ({k.sign})' for k in KINDS)}"
        )
    return found[0][0](directory, ends, aux_layers, masks, skip_damaged)


def is_captured(path: Path) -> bool:
    """Does the directory show one of these kinds?"""
    return path.is_dir() and any(kind.mark(path) for kind in KINDS)
