package tree

// Limit sets the greatest number of entries that c copies.
func Limit(c *Copy, n int64) { c.limit = n }
