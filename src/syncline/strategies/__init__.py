"""Ways of agreeing: when workers talk, with whom, and what they exchange. One per file."""
