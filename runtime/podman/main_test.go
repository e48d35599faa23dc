//go:build integration

package podman

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
)

// TestMain makes the test binary the first process of containers, which mount it in place of
// doze-guest.
func TestMain(m *testing.M) {
	if part := os.Getenv("DOZE_TEST_PROBE"); part != "" && os.Getpid() == 1 {
		os.Exit(probe(part))
	}
	if dir := os.Getenv("DOZE_TEST_NODE"); dir != "" {
		victim(dir)
	}
	os.Exit(m.Run())
}

// probe is a first process with the behavior that part selects.
func probe(part string) int {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	switch part {
	case "wait": // until SIGTERM
		fmt.Println("probe waits")
		<-term
		return 0
	case "fail":
		fmt.Println("first line")
		fmt.Println("last words")
		return 7
	case "count":
		return count()
	case "deaf":
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("probe is deaf")
		select {}
	}
	fmt.Println("unknown part", part)
	return 2
}

// victim is a node that waits to be killed.
func victim(dir string) {
	if _, err := Open(context.Background(), Config{Node: "victim", RunDir: dir, Socket: dir + "/none.sock", Helper: helperProgram()}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	select {}
}
