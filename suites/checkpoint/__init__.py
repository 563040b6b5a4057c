"""Tests of checkpoints: their contents, the refused files, and trainings that resume from them."""

import pytest

pytest.importorskip("xxhash", reason="a checkpoint needs xxhash: pip install 'pdlcheck[checkpoint]'")
