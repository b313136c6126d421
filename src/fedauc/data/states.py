"""The 50 states of the USA by their postal abbreviations."""

from __future__ import annotations

WORDS = """
AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND OH OK OR PA RI SC
SD TN TX UT VT VA WA WV WI WY
"""

STATES = tuple(WORDS.split())
