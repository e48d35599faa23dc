// Package enginetest is the conformance suite of sandbox.Engine.
package enginetest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// System is an Engine with what it needs to make containers.
type System struct {
	Engine sandbox.Engine
	// Other is the engine of another node on the same machine.
	Other sandbox.Engine
	// Image is present. MissingImage is not and cannot be pulled.
	Image, MissingImage string
	// Spec describes a container whose first process runs until it is signaled to end,
	// and makes the folder and the cgroup that it needs. The id is new.
	Spec func(t testing.TB, id sandbox.ID) sandbox.ContainerSpec
	// Crash kills the first process of a running container without the engine.
	Crash func(t testing.TB, c sandbox.Container)
	// MakeFile makes a file in a folder in dir, which is the run folder of a
	// running container, as the container's root does.
	MakeFile func(t testing.TB, c sandbox.Container, dir string)
	// ProcessLimit is how many processes a running container may have.
	ProcessLimit func(t testing.TB, c sandbox.Container) int64
}

// grace is how long the suite lets first processes end by themselves. One that has
// just been started may not listen yet.
const grace = time.Second

// limits of containers in tests of other behavior.
var limits = sandbox.Limits{PIDs: 64}

// Run runs the suite. Each test opens a System of its own, which ends by
// t.Cleanup; the suite removes its containers before.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"PingReturnsNil", ping},
		{"PresentImageIsNotPulled", imagePresent},
		{"MissingImageIsAnError", imageMissing},
		{"ContainerRunsFromStartToStop", lifecycle},
		{"StoppedContainerStartsAgain", startAgain},
		{"EachStartSetsTheLimitOfProcesses", processLimit},
		{"CallsAreIdempotent", idempotent},
		{"UnknownContainersAreErrors", unknown},
		{"CrashedContainerIsExitedAndStartsAgain", crash},
		{"RemoveEndsARunningContainer", removeRunning},
		{"RemoveEndsACrashingContainer", removeDying},
		{"RemoveFolderRemovesFilesOfContainers", removeFolder},
		{"ListHasContainersOfThisNodeOnly", listOwn},
		{"OriginIsStoredWithTheContainer", storesOrigin},
		{"OtherNodesContainersAreUnknown", othersUnknown},
		{"IDIsReusableAfterRemove", again},
		{"ManyContainersRunConcurrently", many},
		{"ConcurrentStartsOfAContainerStartOneProcess", startAtOnce},
		{"EndedContextEndsTheCall", endedContext},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&suite{T: t, ctx: testkit.Context(t), System: open(t)})
		})
	}
}

type suite struct {
	*testing.T
	System
	ctx context.Context
}

// create makes a container, not started, which is removed with the test.
func (s *suite) create() sandbox.ID {
	s.Helper()
	return s.createFrom(s.spec(sandbox.NewID()))
}

func (s *suite) createFrom(spec sandbox.ContainerSpec) sandbox.ID {
	s.Helper()
	testkit.NoError(s, "Create", s.Engine.Create(s.ctx, spec))
	return spec.ID
}

// spec describes a container that is removed with the test, before the results of Spec.
func (s *suite) spec(id sandbox.ID) sandbox.ContainerSpec {
	s.Helper()
	spec := s.Spec(s, id)
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := s.Engine.Remove(ctx, id); err != nil {
			s.Errorf("Remove: %v", err)
		}
	})
	return spec
}

// start starts a container and checks the result.
func (s *suite) start(id sandbox.ID) sandbox.Container {
	s.Helper()
	return s.startWithin(id, limits)
}

func (s *suite) startWithin(id sandbox.ID, limits sandbox.Limits) sandbox.Container {
	s.Helper()
	c, err := s.Engine.Start(s.ctx, id, limits)
	testkit.NoError(s, "Start", err)
	if c.ID != id || c.State != sandbox.ContainerRunning || c.PID <= 0 {
		s.Fatalf("Start returned %+v", c)
	}
	return c
}

func (s *suite) stop(id sandbox.ID) {
	s.Helper()
	testkit.NoError(s, "Stop", s.Engine.Stop(s.ctx, id, grace))
}

func (s *suite) remove(id sandbox.ID) {
	s.Helper()
	testkit.NoError(s, "Remove", s.Engine.Remove(s.ctx, id))
}

func (s *suite) inspect(id sandbox.ID, want sandbox.ContainerState) sandbox.Container {
	s.Helper()
	c, err := s.Engine.Inspect(s.ctx, id)
	testkit.NoError(s, "Inspect", err)
	if c.ID != id || c.State != want {
		s.Fatalf("Inspect returned %+v, want %s", c, want)
	}
	if runs := want == sandbox.ContainerRunning || want == sandbox.ContainerPaused; runs != (c.PID > 0) {
		s.Fatalf("Inspect returned PID %d for a container that is %s", c.PID, want)
	}
	return c
}

func (s *suite) gone(id sandbox.ID) {
	s.Helper()
	_, err := s.Engine.Inspect(s.ctx, id)
	testkit.ErrorIs(s, "Inspect", err, sandbox.ErrNoContainer)
	if _, listed := s.listed(s.Engine)[id]; listed {
		s.Fatalf("List still has %s", id)
	}
}

func (s *suite) listed(e sandbox.Engine) map[sandbox.ID]sandbox.Container {
	s.Helper()
	list, err := e.List(s.ctx)
	testkit.NoError(s, "List", err)
	byID := make(map[sandbox.ID]sandbox.Container, len(list))
	for _, c := range list {
		if _, twice := byID[c.ID]; twice {
			s.Fatalf("List has %s twice", c.ID)
		}
		byID[c.ID] = c
	}
	return byID
}

func ping(s *suite) {
	testkit.NoError(s, "Ping", s.Engine.Ping(s.ctx))
}

func imagePresent(s *suite) {
	for _, progress := range []func(string){nil, func(line string) { s.Logf("progress: %s", line) }} {
		testkit.NoError(s, "EnsureImage", s.Engine.EnsureImage(s.ctx, s.Image, progress))
	}
}

func imageMissing(s *suite) {
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			err := s.Engine.EnsureImage(s.ctx, s.MissingImage, nil)
			testkit.ErrorIs(s, "EnsureImage", err, sandbox.ErrImageMissing)
			if err != nil && !strings.Contains(err.Error(), s.MissingImage) {
				s.Errorf("the error does not name the image: %v", err)
			}
		})
	}
	group.Wait()
}

func lifecycle(s *suite) {
	id := s.create()
	s.inspect(id, sandbox.ContainerCreated)
	c := s.start(id)
	if now := s.inspect(id, sandbox.ContainerRunning); now.PID != c.PID {
		s.Fatalf("Start gave PID %d, Inspect %d", c.PID, now.PID)
	}
	if got := s.listed(s.Engine)[id]; got != c {
		s.Fatalf("List has %+v, Start gave %+v", got, c)
	}
	line, err := s.Engine.LastLog(s.ctx, id)
	if err != nil || len(line) > 1000 || strings.HasSuffix(line, "\n") {
		s.Fatalf("LastLog: %d bytes %q, %v", len(line), line, err)
	}
	s.stop(id)
	s.inspect(id, sandbox.ContainerExited)
	if got := s.listed(s.Engine)[id]; got.State != sandbox.ContainerExited || got.PID != 0 {
		s.Fatalf("List has %+v for a container that exited", got)
	}
	s.remove(id)
	s.gone(id)
}

func startAgain(s *suite) {
	id := s.create()
	for range 3 {
		s.start(id)
		s.stop(id)
	}
	s.inspect(id, sandbox.ContainerExited)
}

func processLimit(s *suite) {
	id := s.create()
	for _, most := range []int64{64, 32, 96} { // as after changes of its size
		c := s.startWithin(id, sandbox.Limits{PIDs: most})
		if got := s.ProcessLimit(s, c); got != most {
			s.Errorf("the limit is %d processes, want %d", got, most)
		}
		s.stop(id)
	}
}

func idempotent(s *suite) {
	spec := s.spec(sandbox.NewID())
	id := s.createFrom(spec)
	s.createFrom(spec)
	s.stop(id) // never started
	s.inspect(id, sandbox.ContainerCreated)
	c := s.start(id)
	if again := s.start(id); again.PID != c.PID {
		s.Fatalf("the second Start gave PID %d, the first %d", again.PID, c.PID)
	}
	s.createFrom(spec)
	if now := s.inspect(id, sandbox.ContainerRunning); now.PID != c.PID {
		s.Fatalf("Create replaced process %d by %d", c.PID, now.PID)
	}
	s.stop(id)
	s.stop(id)
	s.remove(id)
	s.remove(id)
}

func unknown(s *suite) {
	id := sandbox.NewID()
	_, err := s.Engine.Start(s.ctx, id, limits)
	testkit.ErrorIs(s, "Start", err, sandbox.ErrNoContainer)
	s.gone(id)
	s.remove(id)
}

func crash(s *suite) {
	id := s.create()
	c := s.start(id)
	s.Crash(s, c)
	s.await(id, sandbox.ContainerExited)
	if again := s.start(id); again.PID == 0 {
		s.Fatalf("Start after a crash gave %+v", again)
	}
}

// await waits until the engine reports that state of the container.
func (s *suite) await(id sandbox.ID, want sandbox.ContainerState) {
	s.Helper()
	testkit.Eventually(s, "the container is "+string(want), func() bool {
		c, err := s.Engine.Inspect(s.ctx, id)
		testkit.NoError(s, "Inspect", err)
		return c.State == want
	})
}

func removeRunning(s *suite) {
	id := s.create()
	s.start(id)
	s.remove(id)
	s.gone(id)
}

func removeDying(s *suite) {
	for range 20 {
		id := s.create()
		s.Crash(s, s.start(id))
		s.remove(id)
		s.gone(id)
	}
}

func removeFolder(s *suite) {
	spec := s.spec(sandbox.NewID())
	id := s.createFrom(spec)
	s.MakeFile(s, s.start(id), spec.RunDir)
	s.remove(id)
	for range 2 {
		testkit.NoError(s, "RemoveFolder", s.Engine.RemoveFolder(s.ctx, spec.RunDir))
		if _, err := os.Lstat(spec.RunDir); !errors.Is(err, fs.ErrNotExist) {
			s.Fatalf("the folder still exists: %v", err)
		}
	}
	if _, err := os.Lstat(filepath.Dir(spec.RunDir)); err != nil {
		s.Errorf("the folder above: %v", err)
	}
}

func storesOrigin(s *suite) {
	spec := s.spec(sandbox.NewID())
	spec.Origin = `{"name":"app","env":{"A":"'\"$\n","B":"` + strings.Repeat("ü", 32<<10) + `"}}`
	s.createFrom(spec)
	inspected, err := s.Engine.Inspect(s.ctx, spec.ID)
	testkit.NoError(s, "Inspect", err)
	for method, c := range map[string]sandbox.Container{"List": s.listed(s.Engine)[spec.ID], "Inspect": inspected} {
		if c.Origin != spec.Origin || c.ImageRef != spec.ImageRef || c.CreatedAt.IsZero() {
			s.Errorf("%s has origin %.100q (%d bytes, want %d), image %q, made at %v", method, c.Origin, len(c.Origin), len(spec.Origin), c.ImageRef, c.CreatedAt)
		}
	}
}

func listOwn(s *suite) {
	ids := []sandbox.ID{s.create(), s.create(), s.create()}
	s.start(ids[0])
	own, others := s.listed(s.Engine), s.listed(s.Other)
	if len(own) != len(ids) {
		s.Errorf("List has %d containers, want %d: %v", len(own), len(ids), own)
	}
	for _, id := range ids {
		if _, ok := own[id]; !ok {
			s.Errorf("List lacks %s", id)
		}
		if _, ok := others[id]; ok {
			s.Errorf("the other node lists %s", id)
		}
	}
}

func othersUnknown(s *suite) {
	id := s.create()
	c := s.start(id)
	_, err := s.Other.Inspect(s.ctx, id)
	testkit.ErrorIs(s, "Inspect by the other node", err, sandbox.ErrNoContainer)
	_, err = s.Other.Start(s.ctx, id, limits)
	testkit.ErrorIs(s, "Start by the other node", err, sandbox.ErrNoContainer)
	testkit.NoError(s, "Remove by the other node", s.Other.Remove(s.ctx, id))
	if now := s.inspect(id, sandbox.ContainerRunning); now.PID != c.PID {
		s.Errorf("another node replaced process %d by %d", c.PID, now.PID)
	}
}

func again(s *suite) {
	id := s.create()
	s.start(id)
	s.remove(id)
	s.createFrom(s.spec(id))
	s.inspect(id, sandbox.ContainerCreated)
	s.start(id)
}

func many(s *suite) {
	var group errgroup.Group
	for range 6 {
		spec := s.spec(sandbox.NewID())
		group.Go(func() error { return s.runThrough(spec) })
	}
	testkit.NoError(s, "run a container", group.Wait())
	if left := s.listed(s.Engine); len(left) > 0 {
		s.Errorf("List still has %v", left)
	}
}

// runThrough creates, starts, stops and removes a container, without s.Fatal: it runs
// concurrently.
func (s *suite) runThrough(spec sandbox.ContainerSpec) error {
	if err := s.Engine.Create(s.ctx, spec); err != nil {
		return err
	}
	for range 2 {
		c, err := s.Engine.Start(s.ctx, spec.ID, limits)
		if err != nil {
			return err
		}
		if c.ID != spec.ID || c.State != sandbox.ContainerRunning {
			return fmt.Errorf("started %s, which is %+v", spec.ID, c)
		}
		if err := s.Engine.Stop(s.ctx, spec.ID, grace); err != nil {
			return err
		}
	}
	return s.Engine.Remove(s.ctx, spec.ID)
}

func startAtOnce(s *suite) {
	id := s.create()
	const count = 8
	pids := make(chan int, count)
	var group sync.WaitGroup
	for range count {
		group.Go(func() {
			c, err := s.Engine.Start(s.ctx, id, limits)
			if err != nil {
				s.Errorf("Start: %v", err)
			}
			pids <- c.PID
		})
	}
	group.Wait()
	want := s.inspect(id, sandbox.ContainerRunning).PID
	for range count {
		if pid := <-pids; pid != want {
			s.Errorf("a Start gave PID %d, want %d", pid, want)
		}
	}
}

func endedContext(s *suite) {
	id := s.create()
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	_, err := s.Engine.Start(ended, id, limits)
	testkit.ErrorIs(s, "Start", err, context.Canceled)
	s.inspect(id, sandbox.ContainerCreated)
}
