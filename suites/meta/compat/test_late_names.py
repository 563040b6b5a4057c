"""Private names in modules that take long to import are in the table, but a session does not check them."""

from __future__ import annotations

import subprocess
import sys

from pdlcheck.compat.private import names
from pdlcheck.compat.torch.globals import CONTEXTS

CHECK = """
import sys
from pdlcheck.compat import private
from pdlcheck.worlds import get_world
get_world("sim").run(print, world_size=2)
assert not [row.path for row in private._registered.values() if row.library == "torch" and not row.is_there()]
assert "pdlcheck.compat.torch.globals" in sys.modules
print([name for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor") if name in sys.modules])
"""


def test_a_check_of_the_names_in_use_does_not_import_the_slow_modules():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_the_whole_table_has_their_names():
    paths = {row.path for row in names("torch")}
    assert "torch._dynamo.eval_frame._stance" in paths
    assert {".".join(filter(None, one[:3])) for one in CONTEXTS} <= paths
