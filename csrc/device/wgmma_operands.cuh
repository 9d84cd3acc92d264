// Operands of warpgroup products by the number of registers that D has: MOSS_WGMMA_NAMES_<n>, what the instruction
// calls them, and MOSS_WGMMA_SUMS_<n>, the registers `d`. Inline assembly has no loop for either.
#pragma once

#define MOSS_WGMMA_SUM(i) "+f"(d[i])
#define MOSS_WGMMA_SUM_4(i) MOSS_WGMMA_SUM(i), MOSS_WGMMA_SUM(i + 1), MOSS_WGMMA_SUM(i + 2), MOSS_WGMMA_SUM(i + 3)
#define MOSS_WGMMA_SUM_16(i) \
  MOSS_WGMMA_SUM_4(i), MOSS_WGMMA_SUM_4(i + 4), MOSS_WGMMA_SUM_4(i + 8), MOSS_WGMMA_SUM_4(i + 12)

#define MOSS_WGMMA_NAMES_4 "%0, %1, %2, %3"
#define MOSS_WGMMA_NAMES_8 MOSS_WGMMA_NAMES_4 ", %4, %5, %6, %7"
#define MOSS_WGMMA_NAMES_12 MOSS_WGMMA_NAMES_8 ", %8, %9, %10, %11"
#define MOSS_WGMMA_NAMES_16 MOSS_WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOSS_WGMMA_NAMES_24 MOSS_WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOSS_WGMMA_NAMES_32 \
  MOSS_WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOSS_WGMMA_NAMES_40 MOSS_WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOSS_WGMMA_NAMES_48 MOSS_WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOSS_WGMMA_NAMES_64                                                              \
  MOSS_WGMMA_NAMES_32                                                                    \
      ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
      ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOSS_WGMMA_NAMES_72 MOSS_WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MOSS_WGMMA_NAMES_76 MOSS_WGMMA_NAMES_72 ", %72, %73, %74, %75"
#define MOSS_WGMMA_NAMES_80 MOSS_WGMMA_NAMES_76 ", %76, %77, %78, %79"
#define MOSS_WGMMA_NAMES_96 \
  MOSS_WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOSS_WGMMA_NAMES_100 MOSS_WGMMA_NAMES_96 ", %96, %97, %98, %99"
#define MOSS_WGMMA_NAMES_120                                                                             \
  MOSS_WGMMA_NAMES_100                                                                                   \
      ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115" \
      ", %116, %117, %118, %119"
#define MOSS_WGMMA_NAMES_128 MOSS_WGMMA_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define MOSS_WGMMA_SUMS_4 MOSS_WGMMA_SUM_4(0)
#define MOSS_WGMMA_SUMS_8 MOSS_WGMMA_SUMS_4, MOSS_WGMMA_SUM_4(4)
#define MOSS_WGMMA_SUMS_12 MOSS_WGMMA_SUMS_8, MOSS_WGMMA_SUM_4(8)
#define MOSS_WGMMA_SUMS_16 MOSS_WGMMA_SUMS_8, MOSS_WGMMA_SUM_4(8), MOSS_WGMMA_SUM_4(12)
#define MOSS_WGMMA_SUMS_24 MOSS_WGMMA_SUMS_16, MOSS_WGMMA_SUM_4(16), MOSS_WGMMA_SUM_4(20)
#define MOSS_WGMMA_SUMS_32 MOSS_WGMMA_SUMS_16, MOSS_WGMMA_SUM_16(16)
#define MOSS_WGMMA_SUMS_40 MOSS_WGMMA_SUMS_32, MOSS_WGMMA_SUM_4(32), MOSS_WGMMA_SUM_4(36)
#define MOSS_WGMMA_SUMS_48 MOSS_WGMMA_SUMS_32, MOSS_WGMMA_SUM_16(32)
#define MOSS_WGMMA_SUMS_64 MOSS_WGMMA_SUMS_32, MOSS_WGMMA_SUM_16(32), MOSS_WGMMA_SUM_16(48)
#define MOSS_WGMMA_SUMS_72 MOSS_WGMMA_SUMS_64, MOSS_WGMMA_SUM_4(64), MOSS_WGMMA_SUM_4(68)
#define MOSS_WGMMA_SUMS_76 MOSS_WGMMA_SUMS_72, MOSS_WGMMA_SUM_4(72)
#define MOSS_WGMMA_SUMS_80 MOSS_WGMMA_SUMS_64, MOSS_WGMMA_SUM_16(64)
#define MOSS_WGMMA_SUMS_96 MOSS_WGMMA_SUMS_80, MOSS_WGMMA_SUM_16(80)
#define MOSS_WGMMA_SUMS_100 MOSS_WGMMA_SUMS_96, MOSS_WGMMA_SUM_4(96)
#define MOSS_WGMMA_SUMS_120 MOSS_WGMMA_SUMS_100, MOSS_WGMMA_SUM_16(100), MOSS_WGMMA_SUM_4(116)
#define MOSS_WGMMA_SUMS_128 MOSS_WGMMA_SUMS_120, MOSS_WGMMA_SUM_4(120), MOSS_WGMMA_SUM_4(124)
