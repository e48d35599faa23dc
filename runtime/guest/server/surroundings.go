package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// surroundings are what a terminal takes over from the shell of a session.
type surroundings struct {
	dir string   // working directory
	env []string // exported variables
}

// surroundingsOf waits until the session executes no command, at most for cfg.surroundings.
// Only the shell itself knows which variables are exported: it executes a program that prints
// its environment.
func (s *Server) surroundingsOf(ctx context.Context, session string) (*surroundings, error) {
	ss, err := s.sessions.find(session)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err = ss.acquire(ctx, s.cfg.surroundings); err != nil {
		if e, ok := errors.AsType[*guest.Error](err); ok && e.Code == guest.CodeSessionBusy {
			err = refuse(guest.CodeSessionBusy, "the session %s has executed other commands for %s; interrupt it, or open the terminal when they have ended", session, s.cfg.surroundings)
		}
		return nil, err
	}
	defer ss.release()
	// -p finds the program also when PATH is unusable.
	c, _, err := ss.begin(`\command -p cat /proc/self/environ`+"\n", guest.ExecRequest{}, s.cfg.drain)
	if err != nil {
		return nil, err
	}
	defer c.close()
	var frames boundedBuffer
	x := &execution{program: c, outputs: c.outputs, server: s, timeout: s.cfg.surroundings, endures: true, began: began}
	if err = x.serve(ctx, &frameWriter{w: &frames}); err != nil {
		return nil, refuse(guest.CodeInternal, "read the environment of the session %s: %v", session, err)
	}
	var environ, complaint bytes.Buffer
	var result guest.ExecResult
	receiveFrames(&frames, func(t guest.FrameType, data []byte) error {
		switch t {
		case guest.FrameStdout:
			environ.Write(data)
		case guest.FrameStderr:
			complaint.Write(data)
		case guest.FrameComplete:
			return guest.DecodePayload(data, &result)
		}
		return nil
	}) // ends with io.EOF
	if result.ExitCode != 0 || result.TimedOut || environ.Len() == 0 {
		return nil, refuse(guest.CodeInternal, "the session %s did not print its environment within %s: exit code %d, %.200q", session, s.cfg.surroundings, result.ExitCode, complaint.String())
	}
	in := &surroundings{dir: "/proc/" + strconv.Itoa(ss.tree.root.pid) + "/cwd"}
	for kv := range strings.SplitSeq(environ.String(), "\x00") {
		switch name, _, ok := strings.Cut(kv, "="); name {
		case markName, commandName, "_": // of the session alone
		default:
			if ok && name != "" {
				in.env = append(in.env, kv)
			}
		}
	}
	return in, nil
}

// boundedBuffer refuses more than maxEnviron bytes.
type boundedBuffer struct{ bytes.Buffer }

func (b *boundedBuffer) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxEnviron {
		return 0, fmt.Errorf("it has more than %d bytes", maxEnviron)
	}
	return b.Buffer.Write(p)
}
