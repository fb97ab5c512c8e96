"""Takes the screenshots of docs/report.md: `python -m tests.report_screenshots FOLDER`.

FOLDER holds what `tests.report_runs` and a search of `treadle tune` left: see scripts/screenshots.
"""

import io
import sys
from pathlib import Path

from PIL import Image

from tests.browser import Browser
from treadle.report import write

IMAGES = Path(__file__).parents[1] / "docs/images"
LAPTOP, PHONE = (1366, 768, False), (390, 844, True)
SHOTS = (
    ("report-run", "digits", LAPTOP, False, 0),
    ("report-comparison", "search", LAPTOP, True, 0),
    ("report-diverging", "diverging", LAPTOP, False, 0),
    ("report-phone", "diverging", PHONE, True, 1),
)


def main(folder):
    with Browser() as browser:
        for name, run, (width, height, mobile), dark, chart in SHOTS:
            path = write(folder / run, folder / f"{run}.html")
            browser.open(path, width, height, dark, mobile)
            for index in range(browser.evaluate("charts.drawn.length")):
                browser.evaluate(f"charts.drawn[{index}].area.scrollIntoView()")
                browser.wait_frames()
            top = f"charts.drawn[{chart}].figure.offsetTop - 80" if chart else "0"
            browser.evaluate(f"scrollTo(0, {top})")
            browser.wait_frames()
            if browser.messages:
                sys.exit(f"{path}: {browser.messages}")
            # 256 colors suffice, and take a third of the bytes.
            picture = Image.open(io.BytesIO(browser.screenshot())).convert("RGB").quantize(256)
            picture.save(IMAGES / f"{name}.png", optimize=True)
            print(f"{name}.png: {(IMAGES / f'{name}.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
