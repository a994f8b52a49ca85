"""Which free packages the fonts, emoji, pictures and words come from, and what is held out of them.

Owns names, versions and licences. Downloads nothing.
"""

from __future__ import annotations

# Families that give letters; every one is under the Open Font License but those named otherwise.
LATIN = (
    *("inter", "roboto", "roboto-slab", "roboto-mono", "roboto-condensed", "open-sans", "lato"),
    *("montserrat", "poppins", "oswald", "raleway", "merriweather", "playfair-display"),
    *("source-sans-3", "source-serif-4", "noto-sans", "noto-serif", "work-sans", "fira-sans"),
    *("fira-code", "ibm-plex-sans", "ibm-plex-serif", "ibm-plex-mono", "dejavu-sans", "tinos"),
    *("arimo", "cousine", "libre-baskerville", "crimson-text", "eb-garamond", "bitter"),
    *("josefin-sans", "quicksand", "comfortaa", "comic-neue", "caveat", "patrick-hand", "kalam"),
    *("courier-prime", "inconsolata", "jetbrains-mono", "space-mono", "archivo-narrow", "anton"),
    *("exo-2", "titillium-web", "dosis", "pacifico", "lobster", "special-elite", "alegreya"),
    *("spectral", "rajdhani", "teko", "abril-fatface"),
)
LATIN_HELD_OUT = (
    *("pt-serif", "ubuntu", "nunito", "vollkorn", "kanit", "signika", "zilla-slab"),
    "overpass-mono",
)
CHINESE = ("noto-sans-sc", "noto-serif-sc", "zcool-xiaowei", "zcool-kuaile")
CHINESE_HELD_OUT = ("lxgw-wenkai",)
WEIGHTS = (400, 700)  # of each family, where it has them
FONT_VERSION = "^5"  # of npm's @fontsource/FAMILY

# Emoji vendors in npm packages that hold one picture a character.
# Their licences: Apache-2.0, CC-BY 4.0, MIT, CC BY-SA 4.0, and MIT for plain flags.
VENDORS = ("google", "twitter", "fluent", "openmoji", "flag-icons")
VENDOR_HELD_OUT = "facebook"  # its pictures have no clear licence: they measure, nothing is shipped

NPM = {
    "emoji-datasource-google": "16.0.0",
    "emoji-datasource-twitter": "16.0.0",
    "emoji-datasource-facebook": "16.0.0",
    "@lobehub/fluent-emoji-3d": "1.1.0",
    "openmoji": "17.0.0",
    "cldr-annotations-full": "48.2.0",  # names of emoji; Unicode licence
    "cldr-annotations-derived-full": "48.2.0",
    "flag-icons": "7.5.0",
    "mnist": "1.1.0",  # ten thousand handwritten digits; MIT, the digits CC BY-SA 3.0
    **{f"@fontsource/{family}": FONT_VERSION for family in (*LATIN, *LATIN_HELD_OUT)},
    **{f"@fontsource/{family}": FONT_VERSION for family in (*CHINESE, *CHINESE_HELD_OUT)},
}
PIP = {
    "easy-vqa": "1.0",  # MIT
    "wordfreq": "3.1.1",  # Apache-2.0, its lists CC BY-SA 4.0
    "scikit-image": "0.26.0",  # BSD; photographs in the public domain, or CC0
}

# Photographs of things the model was never told of; it should say that it cannot tell.
PHOTOS = {
    "skimage/data/astronaut.png": False,
    "skimage/data/brick.png": False,
    "skimage/data/cell.png": False,
    "skimage/data/chelsea.png": True,
    "skimage/data/coffee.png": False,
    "skimage/data/coins.png": True,
    "skimage/data/grass.png": False,
    "skimage/data/gravel.png": True,
    "skimage/data/hubble_deep_field.jpg": False,
    "skimage/data/ihc.png": False,
    "skimage/data/motorcycle_left.png": False,
    "skimage/data/retina.jpg": True,
    "skimage/data/rocket.jpg": True,
    "skimage/data/camera.png": False,
}  # whether it is held out
