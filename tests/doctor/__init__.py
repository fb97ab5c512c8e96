"""Wrong programs, each with its sound twin, which an examination must tell apart."""
