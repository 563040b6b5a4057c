"""Some launched processes cannot start their session, or their ranks cannot load a file: no process waits for them."""

from __future__ import annotations

import pytest

from .test_launched import by_hand


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["0", "1", "01"])
def test_where_conftest_files_cannot_be_loaded_the_others_hear_of_it_and_end(tmp_path, broken):
    (tmp_path / "conftest.py").write_text(f'import os\nif os.environ["RANK"] in "{broken}": import absent_here\n')
    processes = [by_hand(tmp_path, rank, f"file://{tmp_path}/meeting") for rank in (0, 1)]
    try:
        texts = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = "No module named 'absent_here'"
    assert processes[0].returncode == (4 if "0" in broken else 1), texts
    assert processes[1].returncode == 4, texts
    assert told in texts[0]
    assert (told in texts[1]) == ("1" in broken)
    if broken == "1":
        assert "launched processes could not start their session, rank 1 on " in texts[0]
        assert "1 error" in texts[0]
