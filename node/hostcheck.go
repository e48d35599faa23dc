package node

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/doze-run/doze/runtime/doctor"
)

// checkHost looks, beside what else Open does, whether the host can run
// sandboxes. The channel gets the findings.
func checkHost(ctx context.Context, cfg Config) <-chan []doctor.Finding {
	findings := make(chan []doctor.Finding, 1)
	go func() { // ends by itself: Check is bounded
		findings <- doctor.Check(ctx, doctor.Config{Home: cfg.Home, Cgroup: cfg.Cgroup, NetnsHelper: cfg.NetnsHelper})
	}()
	return findings
}

// report logs what is amiss, and returns an error with every remedy if no
// sandbox could run.
func report(findings []doctor.Finding, log *slog.Logger) error {
	var hopeless []string
	for _, f := range findings {
		if f.OK {
			continue
		}
		if f.Level == doctor.LevelError {
			hopeless = append(hopeless, fmt.Sprintf("%s: %s (remedy: %s)", f.Name, f.Detail, f.Remedy))
			continue
		}
		log.Warn("this host: "+f.Detail, "check", f.Name, "remedy", f.Remedy)
	}
	if len(hopeless) > 0 {
		return fmt.Errorf("no sandbox can run on this host: %s", strings.Join(hopeless, "; "))
	}
	return nil
}
