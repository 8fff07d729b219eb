"""How annotations of t2r are checked while tests run: by beartype, with whole numbers allowed where floats are."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
