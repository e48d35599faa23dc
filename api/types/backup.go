package types

import "time"

// Backup is the disk of a sandbox, or a part of it, in the node's object store.
type Backup struct {
	ID          string    `json:"id" doc:"12 characters of a-z and 0-9; never changes" example:"b4n8r2t6w9xz"`
	Sandbox     string    `json:"sandbox" doc:"Id of the sandbox that was backed up; the sandbox may be destroyed, or be on another node" example:"k3f9x2m7q2az"`
	SandboxName string    `json:"sandbox_name" doc:"Name of the sandbox at the time of the backup" example:"shop"`
	Image       string    `json:"image" doc:"Image that the disk is based on" example:"base"`
	CreatedAt   time.Time `json:"created_at" doc:"Time of the disk state in the backup"`
	SizeBytes   int64     `json:"size_bytes" doc:"Size of the files, without holes and without the image" example:"247463936"`
	Entries     int64     `json:"entries" doc:"Number of files, folders and links" example:"20201"`
	StoredBytes int64     `json:"stored_bytes" doc:"Number of bytes that were sent to the object store; content of earlier backups is not sent again" example:"1258291"`
	DurationMS  float64   `json:"duration_ms" doc:"How long the backup took, in milliseconds"`
	FrozenMS    float64   `json:"frozen_ms,omitempty" doc:"How long the programs of the sandbox were stopped, in milliseconds; missing if no programs ran"`
	Paths       []string  `json:"paths,omitempty" nullable:"false" doc:"Paths that the backup contains; a restore replaces only these. Missing if it contains the whole disk" example:"[\"/srv/shop\"]"`
	Excludes    []string  `json:"excludes,omitempty" nullable:"false" doc:"Patterns of files and folders that were left out" example:"[\"node_modules/\"]"`
	Gitignore   bool      `json:"gitignore,omitempty" doc:"Whether files that git ignores were left out"`
}

// BackupList is a page of backups.
type BackupList struct {
	Backups    []Backup `json:"backups" nullable:"false" doc:"Backups, newest first"`
	NextCursor string   `json:"next_cursor,omitempty" doc:"Cursor of the next page; missing on the last page"`
}

// CreateBackupRequest backs up the disk of a sandbox, or a part of it.
type CreateBackupRequest struct {
	Paths      []string `json:"paths,omitempty" nullable:"false" maxItems:"100" doc:"Absolute paths of the files and folders to back up, without one inside another; paths and excludes together have at most 32 KiB; default: the whole disk above its image" example:"[\"/srv/shop\"]"`
	Excludes   []string `json:"excludes,omitempty" nullable:"false" maxItems:"100" doc:"Patterns of files and folders to leave out, in the syntax of a .gitignore file in the root folder, of at most 1024 bytes each" example:"[\"node_modules/\"]"`
	Gitignore  bool     `json:"gitignore,omitempty" doc:"Leave out files that the .gitignore files in work trees of git ignore"`
	RetainLast int      `json:"keep_last,omitempty" minimum:"0" maximum:"10000" doc:"How many of the sandbox's newest backups of the same paths to retain, including this one; the node deletes the others; default: all" example:"7"`
	Stream     bool     `json:"stream,omitempty" doc:"Respond with server-sent events while the backup is made"`
}

// BackupPhase is a phase of a backup or a restore.
type BackupPhase string

const (
	BackupPhaseSnapshot BackupPhase = "snapshot" // a temporary snapshot is made
	BackupPhaseUpload   BackupPhase = "upload"
	BackupPhaseDownload BackupPhase = "download"
)

// Values returns all phases.
func (BackupPhase) Values() []BackupPhase {
	return []BackupPhase{BackupPhaseSnapshot, BackupPhaseUpload, BackupPhaseDownload}
}

// BackupProgress is the data of the event progress.
type BackupProgress struct {
	Phase        BackupPhase `json:"phase" doc:"Current phase: the node copies the disk, uploads it to the object store, or downloads it"`
	Bytes        int64       `json:"bytes" doc:"Size of the files that are done"`
	TotalBytes   int64       `json:"total_bytes,omitempty" doc:"Size of all files, if known" example:"247463936"`
	Entries      int64       `json:"entries" doc:"Number of files, folders and links that are done"`
	TotalEntries int64       `json:"total_entries,omitempty" doc:"Number of all files, folders and links, if known" example:"20201"`
}
