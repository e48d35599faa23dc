package bucketfs

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/doze-run/doze/runtime/objectstore"
)

// Bucket is a folder of a bucket.
type Bucket struct {
	Endpoint             string // http://HOST[:PORT], https://HOST[:PORT], or HOST[:PORT] for https
	Region               string // empty: the client requests it
	Bucket               string
	Prefix               string // empty, or ends in "/"
	AccessKey, SecretKey string
}

// Options of a file system.
type Options struct {
	Bucket   Bucket
	ReadOnly bool
	UID, GID uint32 // owner of everything
	Share    *Share // all mounts of a sandbox have the same one
	Log      *slog.Logger
}

// Check reports whether the bucket exists and accepts the credentials. The error is an
// *objectstore.Error (wrapped), ctx's error, or an error of invalid options.
func Check(ctx context.Context, o Options) error {
	s, err := newStore(o.Bucket)
	if err != nil {
		return err
	}
	defer s.close()
	_, err = s.list(ctx, listing{prefix: o.Bucket.Prefix, limit: 1})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("check bucket %s: %w", o.Bucket.Bucket, objectstore.Classify(err))
}

// MountOptions returns the options of the mount, for mount(2) or fsconfig(2). The caller adds fd,
// rootmode (40000), user_id and group_id. default_permissions is not set: every process that can
// reach the mount may use it.
func MountOptions() []string {
	return []string{"allow_other", fmt.Sprintf("max_read=%d", maxTransfer)}
}
