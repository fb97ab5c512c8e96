"""Runs the tutorials on PyTorch, and stores the pictures that they write.

Usage: python -m tests.tutorial_pictures
"""

import shutil
import tempfile
from pathlib import Path

from tests.repository.test_docs import ROOT, run_page

PICTURES = {
    "classification": {
        "classification.png": "tutorial-classification.png",
        "mistakes.png": "tutorial-mistakes.png",
    }
}


def main():
    """Store each picture in docs/images."""
    for page, pictures in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            run_page(f"docs/tutorials/{page}.md", "torch", Path(folder))
            for written, name in pictures.items():
                shutil.copy(Path(folder) / written, ROOT / "docs/images" / name)
                print(f"docs/images/{name}")


if __name__ == "__main__":
    main()
