// Package bucketstest is the conformance suite of sandbox.Buckets.
package bucketstest

import (
	"context"
	"slices"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// System is a Buckets with sandboxes.
type System struct {
	Buckets sandbox.Buckets
	// Bucket is one of its buckets, Lacking one that its object store does not have. Empty: each bucket exists.
	Bucket, Lacking string
	// Start returns a new sandbox.
	Start func(t testing.TB) Sandbox
	// EndHelper ends what serves the mounts of all sandboxes.
	EndHelper func(t testing.TB)
}

// Sandbox is a running sandbox.
type Sandbox struct {
	ID  sandbox.ID
	PID int // of its first process
	// Folders are two empty folders.
	Folders [2]string
	// Mounted reports whether a bucket is mounted at a path and can be read.
	Mounted func(t testing.TB, path string) bool
}

// Run runs the suite. Each test opens a System of its own, which ends by t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"UnknownBucketsAreErrors", unknown},
		{"CheckFindsTheBucket", check},
		{"MountLastsUntilItsUnmount", mount},
		{"MountReplacesAnEarlierOne", replace},
		{"MountPointIsAFolder", noFolder},
		{"EndedContextMountsNothing", endedContext},
		{"ForgetEndsTheMountsOfOneSandbox", forget},
		{"EndOfTheHelperIsReported", lost},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(&suite{T: t, ctx: testkit.Context(t), System: open(t)}) })
	}
}

type suite struct {
	*testing.T
	System
	ctx context.Context
}

func (s *suite) mount(sb Sandbox, path string) int64 {
	s.Helper()
	generation, err := s.Buckets.Mount(s.ctx, sb.ID, sb.PID, sandbox.Mount{Bucket: s.Bucket, Path: path})
	testkit.NoError(s, "Mount", err)
	return generation
}

func (s *suite) wantMounted(sb Sandbox, path string, want bool) {
	s.Helper()
	if got := sb.Mounted(s, path); got != want {
		s.Errorf("%s is mounted: %t, want %t", path, got, want)
	}
}

func unknown(s *suite) {
	if names := s.Buckets.Names(); !slices.IsSorted(names) || !slices.Contains(names, s.Bucket) {
		s.Errorf("Names returned %q", names)
	}
	sb := s.Start(s)
	m := sandbox.Mount{Bucket: "unknown", Path: sb.Folders[0]}
	testkit.ErrorIs(s, "Check", s.Buckets.Check(s.ctx, m), sandbox.ErrBucketNotFound)
	_, err := s.Buckets.Mount(s.ctx, sb.ID, sb.PID, m)
	testkit.ErrorIs(s, "Mount", err, sandbox.ErrBucketNotFound)
	s.wantMounted(sb, sb.Folders[0], false)
}

func check(s *suite) {
	testkit.NoError(s, "Check", s.Buckets.Check(s.ctx, sandbox.Mount{Bucket: s.Bucket, Prefix: "folder"}))
	if s.Lacking == "" {
		return
	}
	err := s.Buckets.Check(s.ctx, sandbox.Mount{Bucket: s.Lacking})
	if failed, ok := err.(*sandbox.ObjectStoreError); !ok || failed.Failure != sandbox.ObjectStoreNoBucket {
		s.Errorf("Check of a bucket that the object store does not have: %v", err)
	}
}

func mount(s *suite) {
	sb := s.Start(s)
	first, second := sb.Folders[0], sb.Folders[1]
	testkit.NoError(s, "Unmount before Mount", s.Buckets.Unmount(s.ctx, sb.ID, sb.PID, first))
	s.mount(sb, first)
	s.mount(sb, second)
	s.wantMounted(sb, first, true)
	s.wantMounted(sb, second, true)
	testkit.NoError(s, "Unmount", s.Buckets.Unmount(s.ctx, sb.ID, sb.PID, first))
	s.wantMounted(sb, first, false)
	s.wantMounted(sb, second, true)
	testkit.NoError(s, "Unmount again", s.Buckets.Unmount(s.ctx, sb.ID, sb.PID, first))
}

func replace(s *suite) {
	sb := s.Start(s)
	path := sb.Folders[0]
	s.mount(sb, path)
	s.mount(sb, path)
	s.wantMounted(sb, path, true)
	testkit.NoError(s, "Unmount", s.Buckets.Unmount(s.ctx, sb.ID, sb.PID, path))
	s.wantMounted(sb, path, false)
}

func noFolder(s *suite) {
	sb := s.Start(s)
	_, err := s.Buckets.Mount(s.ctx, sb.ID, sb.PID, sandbox.Mount{Bucket: s.Bucket, Path: sb.Folders[0] + "/missing"})
	testkit.ErrorIs(s, "Mount", err, sandbox.ErrNoMountPoint)
}

func endedContext(s *suite) {
	sb := s.Start(s)
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, err := s.Buckets.Mount(ctx, sb.ID, sb.PID, sandbox.Mount{Bucket: s.Bucket, Path: sb.Folders[0]})
	testkit.ErrorIs(s, "Mount", err, context.Canceled)
	s.wantMounted(sb, sb.Folders[0], false)
}

func forget(s *suite) {
	one, other := s.Start(s), s.Start(s)
	for _, sb := range []Sandbox{one, other} {
		s.mount(sb, sb.Folders[0])
	}
	s.Buckets.Forget(one.ID, one.PID)
	testkit.Eventually(s, "the mount has ended", func() bool { return !one.Mounted(s, one.Folders[0]) })
	s.wantMounted(other, other.Folders[0], true)
	s.Buckets.Forget(one.ID, one.PID)
}

func lost(s *suite) {
	sb := s.Start(s)
	path := sb.Folders[0]
	if before := s.mount(sb, path); before != s.Buckets.Generation() {
		s.Errorf("Mount returned the generation %d, Generation %d", before, s.Buckets.Generation())
	}
	before := s.Buckets.Generation()
	go s.EndHelper(s)
	testkit.Receive(s, "the report", s.Buckets.Lost())
	s.wantMounted(sb, path, false)
	if after := s.Buckets.Generation(); after <= before {
		s.Errorf("the generation was %d and is %d", before, after)
	}
	if again := s.mount(sb, path); again != s.Buckets.Generation() {
		s.Errorf("Mount returned the generation %d, Generation %d", again, s.Buckets.Generation())
	}
	s.wantMounted(sb, path, true)
}
