package store

import (
	"fmt"
	"log/slog"
	"strings"
)

// badgerLog forwards Badger's messages to slog. Badger's informational messages are about
// its own files, so they are logged as debug.
type badgerLog struct{ log *slog.Logger }

func (l badgerLog) Errorf(format string, args ...any) { l.log.Error(line(format, args)) }

func (l badgerLog) Warningf(format string, args ...any) { l.log.Warn(line(format, args)) }

func (l badgerLog) Infof(format string, args ...any) { l.log.Debug(line(format, args)) }

// Debugf drops the message: Badger has several for every write.
func (l badgerLog) Debugf(string, ...any) {}

func line(format string, args []any) string {
	return "badger: " + strings.TrimSpace(fmt.Sprintf(format, args...))
}
