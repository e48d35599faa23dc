package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) backupCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Back up disks of sandboxes to an object store",
		Long: `Back up disks of sandboxes to an object store, and restore them, also after the loss of the
node. The operator configures the object store with the block backups in the Caddyfile.
These backups do not include the node's own data: "doze backup-node" copies that data.`,
		Example: `  doze backup create shop --keep-last 7
  doze backup ls shop
  doze backup restore shop b4n8r2t6w9xz
  doze backup rm b4n8r2t6w9xz`,
	}
	cmd.AddCommand(a.createBackupCommand(), a.listBackupsCommand(), a.restoreBackupCommand(), a.removeBackupCommand())
	return cmd
}

func (a *app) createBackupCommand() *cobra.Command {
	var req types.CreateBackupRequest
	cmd := &cobra.Command{
		Use:   "create SANDBOX",
		Short: "Back up the disk of a sandbox, and print the backup's id",
		Long: `Back up the disk of a sandbox in any state, and print the backup's id. This never wakes the
sandbox. Running programs stop for a moment while the last changes are copied. Content of
earlier backups is not sent again. The backup continues if this command is interrupted.

The backup contains the whole disk above its image or, with --path, the named files and
folders. Patterns for --exclude have the syntax of .gitignore files, relative to /.`,
		Example: `  doze backup create shop
  doze backup create shop --path /srv/shop --exclude '*.log' --gitignore`,
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			show, clear := a.backupLine()
			b, err := node.CreateBackup(ctx, args[0], req, show)
			clear()
			return a.print(err, b, "%s", b.ID)
		}),
	}
	cmd.Flags().StringArrayVar(&req.Paths, "path", nil, "back up only this absolute `PATH` of a file or folder; repeatable")
	cmd.Flags().StringArrayVar(&req.Excludes, "exclude", nil, "leave out files and folders that match this `PATTERN`; repeatable")
	cmd.Flags().BoolVar(&req.Gitignore, "gitignore", false, "leave out what git ignores in its work trees")
	cmd.Flags().IntVar(&req.RetainLast, "keep-last", 0, "how many backups of the sandbox and of the same paths to retain; the node deletes the oldest; 0 for all")
	return cmd
}

// backupLine returns functions that show the progress of a backup on a terminal, each phase
// immediately, and that clear the line.
func (a *app) backupLine() (show func(types.BackupProgress), clear func()) {
	line := newProgress(a.err)
	var phase types.BackupPhase
	return func(p types.BackupProgress) {
		wait := progressEvery
		if p.Phase != phase {
			phase, wait = p.Phase, 0
		}
		line.showAfter(wait, backupProgress(p))
	}, line.clear
}

// backupProgress returns a line such as "uploading: 45% (106.2 MiB/236.0 MiB), 9120/20201 files".
func backupProgress(p types.BackupProgress) string {
	text, ok := map[types.BackupPhase]string{
		types.BackupPhaseSnapshot: "copying the disk", types.BackupPhaseUpload: "uploading", types.BackupPhaseDownload: "downloading",
	}[p.Phase]
	if !ok {
		text = string(p.Phase)
	}
	if p.TotalBytes > 0 {
		text += fmt.Sprintf(": %d%% (%s/%s)", int(100*float64(p.Bytes)/float64(p.TotalBytes)), size(p.Bytes), size(p.TotalBytes))
	} else if p.Bytes > 0 {
		text += ": " + size(p.Bytes)
	}
	if p.TotalEntries > 0 {
		text += fmt.Sprintf(", %d/%d files", p.Entries, p.TotalEntries)
	}
	return text
}

func (a *app) listBackupsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls [SANDBOX]",
		Short:             "List the backups of one or all sandboxes, newest first",
		Args:              wants(0, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			sandbox := ""
			if len(args) > 0 {
				sandbox = args[0]
			}
			backups, err := node.Backups(ctx, sandbox)
			if err != nil {
				return err
			}
			heads := []any{"ID", "SANDBOX", "IMAGE", "TAKEN", "SIZE", "SENT", "TOOK", "PATHS"}
			return printTable(a, "backups", backups, heads, func(b types.Backup) []any {
				return []any{b.ID, b.SandboxName, b.Image, ago(b.CreatedAt), size(b.SizeBytes), size(b.StoredBytes), milliseconds(b.DurationMS), pathsText(b.Paths)}
			})
		}),
	}
}

// pathsText returns the paths of a backup or a snapshot for a table, such as "/srv/shop and 2 more". One of the whole disk has
// the path /.
func pathsText(paths []string) string {
	switch len(paths) {
	case 0:
		return "/"
	case 1:
		return paths[0]
	default:
		return fmt.Sprintf("%s and %d more", paths[0], len(paths)-1)
	}
}

func (a *app) restoreBackupCommand() *cobra.Command {
	var req types.RestoreRequest
	var force bool
	cmd := &cobra.Command{
		Use:   "restore SANDBOX BACKUP",
		Short: "Replace the disk of a sandbox by a backup",
		Long: `Replace the disk of a sandbox by a backup. The backup may be of another sandbox. The sandbox
keeps running until the backup is on the node. Then its programs end and its files are
discarded; it keeps its name, ports and rules. If the sandbox was running, it starts again.
The restore continues if this command is interrupted.

A backup of paths replaces only these paths; the sandbox keeps all other files.`,
		Example: "  doze backup restore shop b4n8r2t6w9xz",
		Args:    wants(2, 2),
		ValidArgsFunction: a.complete(func(ctx context.Context, node *client.Client, args []string) []string {
			if len(args) == 1 {
				return backupIDs(ctx, node, nil)
			}
			return oneSandbox(ctx, node, args)
		}),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			req.BackupID = args[1]
			show, clear := a.backupLine()
			sb, err := node.RestoreBackup(ctx, args[0], req, force, show)
			clear()
			return a.printState(sb, err)
		}),
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also end requests and commands in progress")
	cmd.Flags().BoolVar(&req.AllowOtherImage, "allow-other-image", false, "if the node does not have the backup's image, use the image that has its name now")
	return cmd
}

func (a *app) removeBackupCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "rm BACKUP...",
		Short:             "Delete backups",
		Long:              "Delete backups. Content that no other backup has is removed from the object store later.",
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(backupIDs),
		RunE: a.forEach(func(ctx context.Context, node *client.Client, backup string) error {
			return a.printGone(node.DeleteBackup(ctx, backup), backup, "deleted")
		}),
	}
}

// backupIDs returns the ids of all backups.
func backupIDs(ctx context.Context, node *client.Client, _ []string) []string {
	backups, _ := node.Backups(ctx, "")
	return texts(backups, func(b types.Backup) string { return b.ID })
}
