"""Removing the checkpoints of a run, and no other files."""

import re

from ..core.folder import PARTIAL, Folder, partial
from .format import FIXED, Name
from .tensor_file import SUFFIX

SHARED = re.compile(rf"[0-9a-f]{{64}}(?:{re.escape(SUFFIX)}|\.npz)")


def remove_checkpoints(directory: Folder, name: str) -> None:
    """Remove all checkpoints in a folder, and the folder if nothing else is in it.

    A link is left alone: what it points to may belong to another run. The folder is renamed first:
    if the process is killed meanwhile, no run resumes from the checkpoints that are left.

    Args:
        directory: The run directory.
        name: The name of the folder with the checkpoints.
    """
    if not directory.is_folder(name):
        return
    hidden = name if name.startswith(PARTIAL) else partial(name)
    if hidden != name:
        directory.rename(name, hidden)
    with directory.subfolder(hidden) as folder:
        for found in folder.names():
            if found.startswith(PARTIAL) or (Name.parse(found) and folder.is_folder(found)):
                folder.remove_folder(found)
        if folder.is_folder(FIXED):
            with folder.subfolder(FIXED) as fixed:
                for found in fixed.names():
                    if found.startswith(PARTIAL) or SHARED.fullmatch(found):
                        fixed.remove_folder(found)
                is_empty = not fixed.names()
            if is_empty:
                folder.remove_empty_folder(FIXED)
        is_empty = not folder.names()
    if is_empty:
        directory.remove_empty_folder(hidden)
    elif hidden != name:
        directory.rename(hidden, name)
