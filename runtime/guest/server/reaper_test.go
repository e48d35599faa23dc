package server

import (
	"syscall"
	"testing"
)

const exitedWith1 = syscall.WaitStatus(1 << 8)

func TestEndOfAChildThatIsNotKnownYetIsKept(t *testing.T) {
	r := &reaper{init: true, children: map[int]*child{}, starts: map[*starting]bool{}}
	begun := r.begin()
	r.mu.Lock()
	r.ended(77, exitedWith1)
	r.mu.Unlock()
	c, err := r.register(begun, 77, nil)
	if err != nil || c.running() || c.status != exitedWith1 {
		t.Errorf("the child runs: %v, status %v, error %v", c.running(), c.status, err)
	}
}

// An orphan's number may be used again immediately, by a child that is started while
// another start is still under way.
func TestChildDoesNotGetTheEndOfAnOrphanThatHadItsNumber(t *testing.T) {
	r := &reaper{init: true, children: map[int]*child{}, starts: map[*starting]bool{}}
	slow := r.begin()
	r.mu.Lock()
	r.ended(77, exitedWith1) // the orphan
	r.mu.Unlock()
	c, err := r.register(r.begin(), 77, nil)
	if err != nil || !c.running() {
		t.Fatalf("a child that runs has status %v, error %v", c.status, err)
	}
	if _, err := r.register(slow, 0, syscall.ENOENT); err != syscall.ENOENT {
		t.Errorf("a start that failed: %v", err)
	}
	if len(r.starts) != 0 {
		t.Errorf("%d starts are remembered", len(r.starts))
	}
}
