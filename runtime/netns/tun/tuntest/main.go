// Package tuntest runs tests that create network devices.
package tuntest

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/runtime/netns/tun"
)

// namespaceVariable is set in the test process that runs in its own namespaces.
const namespaceVariable = "DOZE_TEST_NAMESPACES"

// Main is the TestMain of a package whose tests create network devices. It calls EnterNamespaces and
// runs the tests. Leaked goroutines are a failure.
func Main(m *testing.M) {
	EnterNamespaces()
	goleak.VerifyTestMain(m)
}

// EnterNamespaces runs the test program again as root of a new user namespace and network namespace,
// where it may create devices without privileges on the host, and where 127.0.0.1 is usable.
// It returns only in that process; this one exits with its exit code.
func EnterNamespaces() {
	if os.Getenv(namespaceVariable) != "" {
		if err := tun.LoopbackUp(); err != nil {
			panic(err)
		}
		return
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), namespaceVariable+"=yes")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		panic(fmt.Sprintf("this host allows no user namespaces, which doze needs, see `doze doctor`: %v", err))
	}
	_ = cmd.Wait() // an error is in the exit code
	os.Exit(cmd.ProcessState.ExitCode())
}
