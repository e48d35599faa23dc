//go:build integration

package bucket_test

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/runtime/bucket"
	"github.com/doze-run/doze/runtime/disk/disktest"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/bucketstest"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestBucketsConform(t *testing.T) {
	bucketstest.Run(t, func(t *testing.T) bucketstest.System {
		node, s3 := disktest.Open(t), s3test.Start(t)
		data := bucket.Bucket{Endpoint: s3.URL, Region: "us-east-1", Bucket: s3.Bucket, AccessKey: s3.AccessKey, SecretKey: s3.SecretKey}
		lacking := data
		lacking.Bucket = "lacking"
		c := bucket.New(bucket.Config{
			Buckets: map[string]bucket.Bucket{"data": data, "lacking": lacking}, Helper: disktest.Program("doze-bucket"), NetnsHelper: disktest.Program("doze-netns"),
			Scratch: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		})
		t.Cleanup(func() { testkit.NoError(t, "close", c.Close()) })
		return bucketstest.System{
			Buckets: c, Bucket: "data", Lacking: "lacking",
			Start:     func(t testing.TB) bucketstest.Sandbox { return start(t, node) },
			EndHelper: endHelper,
		}
	})
}

func start(t testing.TB, node *disktest.Node) bucketstest.Sandbox {
	t.Helper()
	id := node.Create(t, disktest.BaseImage)
	c, err := node.Engine.Start(testkit.Context(t), id, sandbox.Limits{})
	testkit.NoError(t, "start", err)
	sb := bucketstest.Sandbox{ID: id, PID: c.PID, Folders: [2]string{"/srv/first", "/srv/second"}}
	run := func(script string, args ...string) error {
		return exec.Command("podman", append([]string{"exec", podman.ContainerName(id), "sh", "-c", script, "sh"}, args...)...).Run()
	}
	testkit.NoError(t, "make the folders", run(`mkdir "$@"`, sb.Folders[:]...))
	sb.Mounted = func(_ testing.TB, path string) bool {
		return run(`grep -q " $1 fuse" /proc/self/mounts && ls "$1"`, path) == nil
	}
	return sb
}

// endHelper kills the helpers of this process.
func endHelper(t testing.TB) {
	t.Helper()
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	killed := false
	for _, path := range commands {
		command, _ := os.ReadFile(path)
		if string(command) != disktest.Program("doze-bucket")+"\x00serve\x00" {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		killed = err == nil && syscall.Kill(pid, syscall.SIGKILL) == nil || killed
	}
	if !killed {
		t.Error("no helper runs")
	}
}
