package store

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
)

// childDirEnv makes the test binary a writer in the folder that the variable names.
const childDirEnv = "DOZE_STORE_TEST_DIR"

const childWriters = 8

// writeUntilKilled writes documents, records and events as fast as it can from several
// goroutines. It prints "opening", "open <node id>", and then each acknowledged write as
// "<n> <round>".
func writeUntilKilled(dir string) int {
	fmt.Println("opening")
	s, err := open(dir, "", nil, small)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("open", s.NodeID())
	rounds, err := storedRounds(s)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	failed := make(chan error)
	for n := range childWriters {
		go func() {
			for round := rounds[testID(n)] + 1; ; round++ {
				sb := testRecord(n)
				sb.StateReason = sandbox.StateReason(strconv.Itoa(round))
				if err := s.PutDocument(context.Background(), "rules", string(sb.ID), []byte(sb.StateReason)); err != nil {
					failed <- err
					return
				}
				if err := s.PutSandbox(context.Background(), sb); err != nil {
					failed <- err
					return
				}
				fmt.Println(n, round) // a single write, so that lines do not mix
				seq := uint64(round)
				if err := s.AppendEvents(context.Background(), testEvents(n, seq, seq)); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	fmt.Fprintln(os.Stderr, <-failed)
	return 1
}

// checkDocuments checks that each document is in the round of the record that was written
// after it, or in the next one.
func checkDocuments(t *testing.T, s *Badger, rounds map[sandbox.ID]int) {
	t.Helper()
	documents := allDocuments(t, s, "rules")
	for id, round := range rounds {
		if got, err := strconv.Atoi(documents[string(id)]); err != nil || got < round || got > round+1 {
			t.Fatalf("the document of %s is at round %q, its record at %d", id, documents[string(id)], round)
		}
	}
}

func storedRounds(s sandbox.Store) (map[sandbox.ID]int, error) {
	rounds := make(map[sandbox.ID]int)
	err := s.Sandboxes(context.Background(), func(sb sandbox.Sandbox) (err error) {
		rounds[sb.ID], err = strconv.Atoi(string(sb.StateReason))
		return err
	})
	return rounds, err
}

func TestNothingAcknowledgedIsLostWhenKilled(t *testing.T) {
	dir := t.TempDir()
	acknowledged := make(map[sandbox.ID]int)
	node := ""
	for kill := range 30 {
		// A fifth of the kills hit Open.
		lines := rand.IntN(1500)
		if kill%5 == 0 {
			lines = 0
		}
		for id, round := range runAndKill(t, dir, lines) {
			acknowledged[id] = round
		}
		if kill%3 == 0 {
			continue // two kills in a row without a clean close between them
		}
		s := openAt(t, dir, small)
		rounds, err := storedRounds(s)
		if err != nil {
			t.Fatal(err)
		}
		for id, want := range acknowledged {
			// The write after the last acknowledged one may have succeeded too.
			if got := rounds[id]; got < want || got > want+1 {
				t.Fatalf("kill %d: %s is at round %d, acknowledged was %d", kill, id, got, want)
			}
			acknowledged[id] = rounds[id]
		}
		checkDocuments(t, s, rounds)
		if node != "" && s.NodeID() != node {
			t.Fatalf("kill %d: node id is %s, was %s", kill, s.NodeID(), node)
		}
		node = s.NodeID()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(acknowledged) != childWriters {
		t.Fatalf("%d writers were acknowledged, want %d", len(acknowledged), childWriters)
	}
}

// runAndKill runs a writer, kills it after that many lines and returns the last
// acknowledged round of each record.
func runAndKill(t *testing.T, dir string, lines int) map[sandbox.ID]int {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childDirEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	acknowledged := make(map[sandbox.ID]int)
	scanner := bufio.NewScanner(out)
	read := 0
	for scanner.Scan() {
		var n, round int
		if _, err := fmt.Sscan(scanner.Text(), &n, &round); err == nil {
			acknowledged[testID(n)] = round
		}
		if read == lines {
			cmd.Process.Kill()
		}
		read++ // lines in the pipe were acknowledged too
	}
	cmd.Wait()
	if read <= lines {
		t.Fatalf("the writer ended without a kill after %d lines", read)
	}
	return acknowledged
}
