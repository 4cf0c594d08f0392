"""Lets the tests import the helper modules beside them under any import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
