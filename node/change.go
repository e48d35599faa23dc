package node

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/doze-run/doze/egress"
)

// Change is a configuration that a running node can have. Its caller must Apply or
// Discard it, and soon: until then no other change of egress begins.
type Change struct {
	*egress.Change // Discard ends the change without effect
	node           *Node
	config         Config
}

// Prepare checks whether the running node can have a configuration. It refuses options
// that only a restart can change, and changes nothing.
func (n *Node) Prepare(ctx context.Context, cfg Config) (*Change, error) {
	if err := n.config.CheckChange(cfg); err != nil {
		return nil, err
	}
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	change, err := n.Egress.Prepare(ctx, cfg.Egress)
	if err != nil {
		return nil, err
	}
	return &Change{change, n, cfg}, nil
}

// Apply makes the configuration the node's. If it fails, nothing has changed.
func (c *Change) Apply() error {
	if err := c.node.Sandboxes.Configure(c.config.Sandbox); err != nil {
		c.Discard()
		return err
	}
	c.Change.Apply()
	return nil
}

// CheckChange checks whether a running node can change from configuration c to next. It
// returns a FixedError for each option that only a restart can change, joined by "; ", or
// the error of next.Sandbox.Validate.
func (c Config) CheckChange(next Config) error {
	if err := errors.Join(c.fill(), next.fill()); err != nil {
		return err
	}
	var refused error
	refuse := func(fixed FixedError) {
		if refused == nil {
			refused = fixed
			return
		}
		refused = fmt.Errorf("%w; %w", refused, fixed)
	}
	for _, c := range []struct{ option, have, want string }{
		{"data", c.Home, next.Home},
		{"token_file", c.TokenFile, next.TokenFile},
		{"guest", c.Guest, next.Guest},
		{"netns_helper", c.NetnsHelper, next.NetnsHelper},
		{"disk_helper", c.DiskHelper, next.DiskHelper},
		{"backup_helper", c.BackupHelper, next.BackupHelper},
		{"bucket_helper", c.BucketHelper, next.BucketHelper},
		{"podman_socket", c.PodmanSocket, next.PodmanSocket},
		{"cgroup", c.Cgroup, next.Cgroup},
	} {
		if c.have != c.want {
			refuse(FixedError{c.option, c.have, c.want})
		}
	}
	if !c.Backups.equal(next.Backups) {
		refuse(FixedError{"backups", c.Backups.String(), next.Backups.String()})
	}
	if !maps.Equal(c.Buckets, next.Buckets) {
		refuse(FixedError{"bucket", describeBuckets(c.Buckets), describeBuckets(next.Buckets)})
	}
	if refused != nil {
		return refused
	}
	return next.Sandbox.Validate()
}

// FixedError reports an option that only a restart can change. Have and Want are equal if the change
// is one of secrets.
type FixedError struct{ Option, Have, Want string }

func (e FixedError) Error() string {
	if e.Have == e.Want {
		return e.Option + " cannot change its secrets while the node runs: restart it"
	}
	return fmt.Sprintf("%s cannot change from %q to %q while the node runs: restart it", e.Option, e.Have, e.Want)
}
