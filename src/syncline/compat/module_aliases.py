"""Modules of other libraries by their own names: `import horovod.torch as hvd` in a script that is not changed.

Each folder in `aliases/` has modules with these names, and is put on Python's path: by `PYTHONPATH` for
`syncline run --as`, so that processes that the script starts find them too, or by `import syncline.compat.….install`.
A module of that name beside the script comes first, as usual in Python; one that is installed does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from syncline.errors import IncompatibleError, SpecError
from syncline.specs import nearest

__all__ = ["ALIASES", "alias_variables", "install_aliases"]

FOLDER = Path(__file__).with_name("aliases")
ALIASES: Mapping[str, tuple[str, ...]] = {
    "horovod": ("horovod",),
    "ml_comm": ("ml_comm", "ml_comm_torch", "dl_comm"),
}
"""The folders in `aliases/`, and the modules in each."""
OTHER_NAMES = {
    **dict.fromkeys(("hvd", "horovod.torch"), "horovod"),
    **dict.fromkeys(("mlcommtorch", "dlcomm", "dlcomm.torch"), "ml_comm"),
}
"""What users may write, each with our name."""


def alias_variables(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variable with which Python finds these modules; none without names.

    >>> alias_variables(["ml_comm"], {"PYTHONPATH": "lib"})["PYTHONPATH"].endswith("/aliases/ml_comm:lib")
    True
    >>> alias_variables(["hvd"], {})
    Traceback (most recent call last):
    syncline.errors.SpecError: no modules for 'hvd'; did you mean 'horovod'? available: \
'horovod', 'ml_comm'
    """
    for name in names:
        if name not in ALIASES:
            raise SpecError(f"no modules for {name!r}; {nearest(name, list(ALIASES), OTHER_NAMES)}")
    folders = [str(FOLDER / name) for name in dict.fromkeys(names)]
    paths = [*folders, *filter(None, [environ.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths)} if folders else {}


def install_aliases(name: str) -> None:
    """Let the modules of a name be imported from now on."""
    folder = str(FOLDER / name)
    for module in ALIASES[name]:
        found = sys.modules.get(module)
        if found is not None and not str(getattr(found, "__file__", "")).startswith(folder):
            raise IncompatibleError(
                f"{module} was imported already, from {getattr(found, '__file__', 'elsewhere')}: import "
                f"syncline.compat.{name}.install before it"
            )
    if folder not in sys.path:
        sys.path.insert(1, folder)  # after the script's folder
