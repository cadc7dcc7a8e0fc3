"""Draws docs/plan.png, the picture on the first page: the page of a plan, rendered by Chromium. `make picture`"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

PICTURE = Path(__file__).parent / "plan.png"
PLAN = ["vgg16", "--cluster", "ethernet-1g", "--devices", "8", "--batch", "256", "--what-if", "1"]
HIDDEN = (
    "#theme, .tools, #memory, #memory-legend, h3:has(+ #memory), h3:has(+ #findings), #findings, section:not(#ranking, #plan)"
)
STYLE = f"<style>{HIDDEN} {{ display: none !important }} .scroll {{ overflow: hidden }}</style></head>"
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
WIDTH, HEIGHT, SCALE, COLOURS = 1160, 1600, 1.5, 224


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "page.html"), Path(folder, "page.png")
        subprocess.run([sys.executable, "-m", "fourfold", "plan", *PLAN, "--report", str(page)], check=True)
        page.write_text(page.read_text().replace("</head>", STYLE, 1))
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *QUIET, f"--user-data-dir={folder}/profile"]
        size = [f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}"]
        subprocess.run([*command, *size, f"--screenshot={shot}", page.as_uri()], check=True, timeout=120)
        picture = Image.open(shot).convert("RGB")
    blank = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    _, _, _, bottom = ImageChops.difference(picture, blank).getbbox() or (0, 0, 0, picture.height)
    picture.crop((0, 0, picture.width, min(bottom + 24, picture.height))).quantize(COLOURS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
