package store

import (
	"fmt"
	"log/slog"
	"strings"
)

// badgerLog gives Badger's messages to slog. What Badger calls information is
// about its own files, so it is debug here.
type badgerLog struct{ log *slog.Logger }

func (l badgerLog) Errorf(format string, args ...any) { l.log.Error(line(format, args)) }

func (l badgerLog) Warningf(format string, args ...any) { l.log.Warn(line(format, args)) }

func (l badgerLog) Infof(format string, args ...any) { l.log.Debug(line(format, args)) }

// Debugf is dropped: Badger formats several lines for every write.
func (l badgerLog) Debugf(string, ...any) {}

func line(format string, args []any) string {
	return "badger: " + strings.TrimSpace(fmt.Sprintf(format, args...))
}
