// A target needs one source to own a precompiled header.
