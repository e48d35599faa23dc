package tree

import (
	"context"

	"golang.org/x/sys/unix"
)

// Limit sets the greatest number of entries that c copies.
func Limit(c *Copy, n int64) { c.limit = n }

// Repeat is the second pass of Prefetch, which a small tree does not need. It calls changes, if it is not nil, after it has read
// the tree.
func Repeat(ctx context.Context, c *Copy, changes func()) error {
	source, err := openFolder(unix.AT_FDCWD, c.source)
	if err != nil {
		return err
	}
	defer unix.Close(source)
	if changes == nil {
		return c.repeat(ctx, source)
	}
	want, err := c.scanChanging(ctx, source)
	if err != nil {
		return err
	}
	changes()
	return c.apply(ctx, source, want, laterChanging)
}
